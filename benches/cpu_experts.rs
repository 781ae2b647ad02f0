//! Experts of a layer on one thread, beside a plain read of the same bytes: `cargo bench -p routed-experts-core --bench
//! cpu_experts`. Every call goes to other experts, so that weights come from memory as they do in a model.

#![allow(missing_docs, reason = "criterion_group! writes a public function without any")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use routed_experts_core::experts::format::{Code, Format, ScaleDtype, Scales};
use routed_experts_core::experts::gate::{Activation, Gate};
use routed_experts_core::experts::levels::available;
use routed_experts_core::experts::number::Dtype;
use routed_experts_core::experts::operand::Grid;
use routed_experts_core::experts::{Address, Call, Layer, Routing, Weights};
use std::hint::black_box;

const EXPERTS: usize = 32;
const HIDDEN: usize = 2048;
const INNER: usize = 768;
/// Rows that every expert that is hit gets.
const ROWS: [usize; 3] = [1, 4, 16];
const HIT: usize = 4;

fn weights(columns: usize, depth: usize, format: Format) -> Weights {
    let column = format.bytes(depth) / format.unit();
    let strides = [columns * column, column, 1].map(|stride| stride as isize);
    Weights { columns, depth, strides, bias_strides: [0, 0], bias: Dtype::F32, format }
}

/// Codes of eight or four bits with a scale for every so many columns and depths.
fn codes(code: Code, block: [usize; 2], dtype: ScaleDtype) -> Format {
    // Every row of blocks reads the same scales: they are few, and stay in the cache anyhow.
    Format::Codes(code, Scales { strides: [0, 0, 1], dtype, block, alternate: false })
}

/// Name, type of the tokens, format of the weights.
fn kinds() -> [(&'static str, Dtype, Format); 6] {
    [
        ("f32", Dtype::F32, Format::Plain(Dtype::F32)),
        ("bf16", Dtype::Bf16, Format::Plain(Dtype::Bf16)),
        ("fp8_block", Dtype::Bf16, codes(Code::E4m3, [128, 128], ScaleDtype::F32)),
        ("mxfp8", Dtype::Bf16, codes(Code::E4m3, [1, 32], ScaleDtype::E8m0)),
        ("mxfp4", Dtype::Bf16, codes(Code::E2m1, [1, 32], ScaleDtype::E8m0)),
        ("mxfp4_f32", Dtype::F32, codes(Code::E2m1, [1, 32], ScaleDtype::E8m0)),
    ]
}

fn routing(rows: usize, first: usize) -> Routing {
    let ids: Vec<i32> = (0..rows * HIT).map(|pair| ((first + pair % HIT) % EXPERTS) as i32).collect();
    // SAFETY: there are rows x HIT ids.
    unsafe { Routing::new(ids.as_ptr(), [HIT as isize, 1], [rows, HIT], EXPERTS) }.expect("sizes of a layout")
}

fn layers(criterion: &mut Criterion) {
    let gate = Gate {
        has_gate: true,
        is_concatenated: true,
        activation: Activation::Silu,
        limit: None,
        alpha: None,
    };
    let scales = [0x7F7F_7F7F_u32; HIDDEN];
    for (name, dtype, format) in kinds() {
        let layer =
            Layer { up: weights(2 * INNER, HIDDEN, format), down: weights(HIDDEN, INNER, format), gate };
        let expert = 2 * INNER * format.bytes(HIDDEN) + HIDDEN * format.bytes(INNER);
        let memory = vec![1_u32; EXPERTS * expert / 4];
        let (x, routing_weights) = (vec![1_u32; 16 * HIDDEN], vec![1.0_f32; 16 * HIT]);
        let mut out = vec![0_u32; 16 * HIDDEN];
        let up = memory.as_ptr().cast::<u8>();
        let down = up.wrapping_add(EXPERTS * 2 * INNER * format.bytes(HIDDEN));
        let address = |matrix| Address { matrix, bias: std::ptr::null(), scales: scales.as_ptr().cast() };
        let mut group = criterion.benchmark_group(format!("cpu_experts/{name}"));
        let bytes = HIT * expert;
        group.throughput(Throughput::Bytes(bytes as u64)).sample_size(20);
        group.bench_function("read", |bencher| {
            let mut parts = memory.chunks_exact(bytes / 4).cycle();
            bencher.iter(|| {
                black_box(parts.next()).map(|part| part.iter().fold(0_u32, |sum, &x| sum.wrapping_add(x)))
            });
        });
        for rows in ROWS {
            let routings: Vec<Routing> =
                (0..EXPERTS).step_by(HIT).map(|first| routing(rows, first)).collect();
            let call = Call {
                shape: [rows, HIT],
                x: Grid { data: x.as_ptr().cast(), dtype, strides: [HIDDEN as isize, 1] },
                weights: Grid {
                    data: routing_weights.as_ptr().cast(),
                    dtype: Dtype::F32,
                    strides: [HIT as isize, 1],
                },
                addresses: [address(up), address(down)],
                out: out.as_mut_ptr().cast(),
                threads: 1,
            };
            for level in available().iter().filter(|level| level.name != "portable") {
                group.bench_function(BenchmarkId::new(level.name, format!("{rows}_rows")), |bencher| {
                    let mut next = routings.iter().cycle();
                    bencher.iter(|| {
                        let routing = next.next().expect("a cycle has no end");
                        // SAFETY: all buffers have the sizes of the layer and the call.
                        unsafe { layer.run(routing, &call, Some(level)) };
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, layers);
criterion_main!(benches);
