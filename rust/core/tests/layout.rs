//! The counting sort against a naive oracle: a stable sort of (bucket, pair).

use proptest::prelude::*;
use routed_experts_core::error::{CoreError, ErrorKind};
use routed_experts_core::layout::{ExpertId, Layout, Shape, first_out_of_range, layout_into};

/// Parts of a layout, owned, in the order of its buffer.
type Parts = [Vec<i32>; 7];

fn build<I: ExpertId>(ids: &[I], experts: usize, alignment: usize, workers: usize) -> Parts {
    let shape = Shape::new(ids.len(), experts, alignment).expect("sizes are in range");
    let mut buffer = vec![i32::MIN; shape.buffer_len()];
    layout_into(ids, &shape, &mut buffer, workers).expect("the buffer fits");
    let layout = Layout::cut(&mut buffer, &shape).expect("the buffer fits");
    let mut padded = [vec![], vec![], vec![]];
    if let Some(parts) = layout.padded {
        padded = [parts.starts.to_vec(), parts.row_expert.to_vec(), parts.block_expert.to_vec()];
    }
    let [starts, row_expert, block_expert] = padded;
    let plain = [layout.order, layout.inverse, layout.counts, layout.offsets].map(|part| part.to_vec());
    let [order, inverse, counts, offsets] = plain;
    [order, inverse, counts, offsets, starts, row_expert, block_expert]
}

fn oracle(ids: &[i64], experts: usize, alignment: usize) -> Parts {
    let bucket = |id: i64| if (0..experts as i64).contains(&id) { id as usize } else { experts };
    let mut order: Vec<i32> = (0..ids.len() as i32).collect();
    order.sort_by_key(|&pair| bucket(ids[pair as usize])); // stable
    let mut inverse = vec![0; ids.len()];
    for (row, &pair) in order.iter().enumerate() {
        inverse[pair as usize] = row as i32;
    }
    let of = |expert: usize| ids.iter().filter(|&&id| bucket(id) == expert).count();
    let counts: Vec<i32> = (0..experts).map(|expert| of(expert) as i32).collect();
    let offsets = counts
        .iter()
        .scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        })
        .collect();
    let mut padded = [vec![], vec![], vec![]];
    if alignment > 1 {
        padded = pad_oracle(&counts, ids.len(), alignment);
    }
    let [starts, row_expert, block_expert] = padded;
    [order, inverse, counts, offsets, starts, row_expert, block_expert]
}

/// Lays the experts' rows down one after the other, then fills with -1 up to the bound.
fn pad_oracle(counts: &[i32], pairs: usize, alignment: usize) -> [Vec<i32>; 3] {
    let bound = pairs + pairs.min(counts.len()) * (alignment - 1);
    let (mut starts, mut rows, mut blocks) = (vec![0], vec![], vec![]);
    for (expert, &count) in counts.iter().enumerate() {
        rows.extend(vec![expert as i32; count as usize]);
        while rows.len() % alignment != 0 {
            rows.push(-1);
        }
        blocks.resize(rows.len() / alignment, expert as i32);
        starts.push(rows.len() as i32);
    }
    assert!(rows.len() <= bound, "the bound must hold whatever the ids");
    rows.resize(bound, -1);
    blocks.resize(bound / alignment, -1);
    [starts, rows, blocks]
}

fn experts() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(3), Just(60), Just(160), Just(384), Just(1024), 1_usize..5000]
}

fn case() -> impl Strategy<Value = (Vec<i64>, usize)> {
    experts().prop_flat_map(|experts| {
        let end = experts as i64;
        let id = prop_oneof![8 => 0..end, 1 => -2..end + 3, 1 => Just(-1), 1 => Just(i64::MIN), 1 => Just(i64::MAX)];
        (prop::collection::vec(id, 0..600), Just(experts))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn equals_the_oracle_on_any_number_of_threads(
        (ids, experts) in case(), alignment in prop_oneof![1_usize..10, Just(64), Just(128)], workers in 1_usize..9,
    ) {
        let expected = oracle(&ids, experts, alignment);
        prop_assert_eq!(&build(&ids, experts, alignment, 1), &expected);
        prop_assert_eq!(&build(&ids, experts, alignment, workers), &expected);
    }

    #[test]
    fn order_is_a_bijection_with_sentinels_last((ids, experts) in case()) {
        let [order, inverse, _, offsets, ..] = build(&ids, experts, 1, 3);
        for (row, &pair) in order.iter().enumerate() {
            prop_assert_eq!(inverse[pair as usize], row as i32);
            let owned = (0..experts as i64).contains(&ids[pair as usize]);
            prop_assert_eq!(owned, (row as i32) < offsets[experts - 1]);
        }
    }

    #[test]
    fn every_id_type_agrees(ids in prop::collection::vec(0_i64..100, 0..300), experts in 1_usize..120) {
        let expected = oracle(&ids, experts, 4);
        macro_rules! agrees {
            ($($id:ty),*) => {$(
                let narrow: Vec<$id> = ids.iter().map(|&id| id as $id).collect();
                prop_assert_eq!(&build(&narrow, experts, 4, 2), &expected, "{}", stringify!($id));
            )*};
        }
        agrees!(u8, i8, i16, i32, i64, u16, u32, u64);
    }

    #[test]
    fn first_out_of_range_is_the_first((ids, experts) in case()) {
        let outside = |id: &i64| !(0..experts as i64).contains(id);
        let expected = ids.iter().position(outside).map(|position| (position, i128::from(ids[position])));
        prop_assert_eq!(first_out_of_range(&ids, experts as u32), expected);
    }
}

#[test]
fn extremes_of_every_type_are_sentinels() {
    assert_eq!(build(&[u64::MAX, 0, 1 << 63, 1 << 32], 2, 1, 1)[0], [1, 0, 2, 3]);
    assert_eq!(build(&[i32::MIN, 0, i32::MAX], 2, 1, 1)[0], [1, 0, 2]);
    assert_eq!(build(&[-1_i8, 127, 0], 5000, 1, 1)[0], [2, 1, 0]);
    assert_eq!(first_out_of_range(&[0, u64::MAX], 2), Some((1, i128::from(u64::MAX))));
}

#[test]
fn groups_start_at_multiples_of_the_alignment() {
    let ids: Vec<u8> = [(0, 128), (1, 130), (2, 65)].iter().flat_map(|&(id, rows)| vec![id; rows]).collect();
    let [_, _, counts, offsets, starts, rows, blocks] = build(&ids, 3, 128, 2);
    assert_eq!(counts, [128, 130, 65]);
    assert_eq!(offsets, [128, 258, 323]);
    assert_eq!(starts, [0, 128, 384, 512]);
    assert_eq!(blocks, [0, 1, 1, 2, -1]);
    assert_eq!(rows.len(), 323 + 3 * 127);
    assert_eq!((rows[257], rows[258], rows[384], rows[448], rows[449]), (1, -1, 2, 2, -1));
}

fn refused(result: Result<Shape, CoreError>) -> CoreError {
    let error = result.expect_err("must be refused");
    assert_eq!(error.kind, ErrorKind::LayoutError);
    assert!(error.found.is_some() && error.needed.is_some() && error.hint.is_some());
    error
}

#[test]
fn sizes_beyond_int32_are_refused() {
    let limit = i32::MAX as usize;
    assert!(Shape::new(limit, 1, 1).is_ok());
    assert_eq!(refused(Shape::new(limit + 1, 1, 1)).found.as_deref(), Some("2147483648"));
    refused(Shape::new(limit - 126, 2, 128));
    refused(Shape::new(usize::MAX, usize::MAX, 1));
    refused(Shape::new(1, 0, 1));
    refused(Shape::new(1, limit + 1, 1));
    refused(Shape::new(1, 1, 0));
    refused(Shape::new(0, 1, limit + 1));
}

#[test]
fn a_buffer_or_ids_of_another_size_are_refused() {
    let shape = Shape::new(4, 2, 1).expect("in range");
    let mut buffer = vec![7; shape.buffer_len() + 1];
    let error = layout_into(&[0, 1, 0, 1], &shape, &mut buffer, 1).expect_err("one number too many");
    assert_eq!((error.found.as_deref(), error.needed.as_deref()), (Some("13"), Some("12")));
    let error = layout_into(&[0, 1, 0], &shape, &mut buffer[1..], 1).expect_err("one id too few");
    assert_eq!(error.found.as_deref(), Some("3"));
    assert!(buffer.iter().all(|&number| number == 7), "nothing is written before a refusal");
}

#[test]
fn threads_are_used_only_where_they_pay() {
    let shape = |pairs, experts| Shape::new(pairs, experts, 1).expect("in range");
    assert_eq!(shape(32_768, 256).workers(64), 1);
    assert_eq!(shape(1 << 24, 256).workers(1), 1);
    assert_eq!(shape(1 << 24, 256).workers(2), 2);
    assert!(shape(1 << 24, 1 << 23).workers(64) <= 2, "merging counts must stay cheaper than the sort");
    assert_eq!(shape(1 << 24, 256).workers(0), 1);
}
