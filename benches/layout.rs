//! Layout of (T, K) ids over E experts: `cargo bench -p routed-experts-core --bench layout`.

#![allow(missing_docs, reason = "criterion_group! writes a public function without any")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use routed_experts_core::layout::{Shape, layout_into};
use std::hint::black_box;

/// (T, K, E): decode of a small and of a large model, prefill, and more pairs than one thread should sort.
const CASES: [(usize, usize, usize); 7] = [
    (1, 8, 128),
    (64, 8, 128),
    (512, 4, 60),
    (4096, 8, 256),
    (32_768, 8, 256),
    (65_536, 8, 256),
    (262_144, 8, 384),
];

/// Ids spread by a fixed multiplicative hash: the same on every run, with no order a predictor could learn.
fn ids(pairs: usize, experts: usize) -> Vec<i64> {
    (0..pairs as u64)
        .map(|i| ((i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) % experts as u64) as i64)
        .collect()
}

fn layouts(criterion: &mut Criterion) {
    for alignment in [1, 128] {
        let mut group = criterion.benchmark_group(format!("layout/alignment_{alignment}"));
        for (tokens, slots, experts) in CASES {
            let pairs = tokens * slots;
            let ids = ids(pairs, experts);
            let shape = Shape::new(pairs, experts, alignment).expect("the cases are in range");
            let mut buffer = vec![0; shape.buffer_len()];
            group.throughput(Throughput::Elements(pairs as u64));
            for workers in [1, 2, 4].into_iter().filter(|&workers| workers == 1 || pairs >= 1 << 15) {
                let id =
                    BenchmarkId::new(format!("T{tokens}_K{slots}_E{experts}"), format!("{workers}_threads"));
                group.bench_function(id, |bencher| {
                    bencher.iter(|| layout_into(black_box(&ids), &shape, black_box(&mut buffer), workers));
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, layouts);
criterion_main!(benches);
