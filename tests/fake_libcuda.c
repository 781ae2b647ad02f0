/* A CUDA driver that runs nothing: it prints each launch as one line. A function is the address of size_t numbers:
   how many parameters it declares, then the size of each. A block of 13 threads is refused.
   Built by test_launch.py; structures as in cuda.h. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    int id;
    char pad[4];
    union { char pad[64]; int number; } value;
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;

enum { INVALID_VALUE = 1, INVALID_HANDLE = 400 };

static int quiet;
void be_quiet(void) { quiet = 1; }

static int launch(const char *how, const Config *c, const size_t *function, void **params) {
    if (quiet) return 0;
    if (c->block[0] == 13) return INVALID_HANDLE;
    printf("%s %u,%u,%u %u,%u,%u %u %lu", how, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
           c->shared, (unsigned long)c->stream);
    for (size_t i = 0; i < function[0]; i++) {
        uint64_t value = 0;
        memcpy(&value, params[i], function[i + 1]);
        printf(" %llx", (unsigned long long)value);
    }
    printf("\n");
    fflush(stdout);
    return 0;
}

int cuLaunchKernel(const size_t *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
    Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
    return extra ? INVALID_VALUE : launch("plain", &config, function, params);
}

int cuLaunchKernelEx(const Config *config, const size_t *function, void **params, void **extra) {
    int serialized = config->count == 1 && config->attributes[0].id == 6 && config->attributes[0].value.number == 1;
    return extra || !serialized ? INVALID_VALUE : launch("dependent", config, function, params);
}

int cuFuncGetParamInfo(const size_t *function, size_t index, size_t *offset, size_t *size) {
    if (index >= function[0]) return INVALID_VALUE;
    *offset = 8 * index;
    *size = function[index + 1];
    return 0;
}

int cuGetErrorName(int code, const char **text) {
    *text = code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : NULL;
    return *text ? 0 : INVALID_VALUE;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == INVALID_HANDLE ? "invalid resource handle" : NULL;
    return *text ? 0 : INVALID_VALUE;
}

int cuCtxGetCurrent(void **context) {
    *context = (void *)0x100;
    return 0;
}

int cuCtxSetCurrent(void *context) { return context ? 0 : INVALID_VALUE; }
