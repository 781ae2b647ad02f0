//! Plans of an exchange, worked out by hand.

use routed_experts_core::dispatch::{Plan, Ranks, Shape, count_rows, plan_into};
use routed_experts_core::error::ErrorKind;

struct Owned {
    rows: Vec<i32>,
    source: Vec<i32>,
    pairs: Vec<i32>,
    place: Vec<i32>,
    homes: Vec<i32>,
}

fn plan(ids: &[i64], slots: usize, experts: usize, ranks: usize) -> Owned {
    let tokens = ids.len().checked_div(slots).unwrap_or(3);
    let shape =
        Shape::new(tokens, slots, Ranks::new(experts, ranks).expect("equal shares")).expect("a small plan");
    let mut buffer = vec![77; shape.buffer_len()];
    plan_into(ids, &shape, &mut buffer).expect("sizes of the shape");
    let parts = Plan::cut(&mut buffer, &shape).expect("sizes of the shape");
    Owned {
        rows: parts.rows.to_vec(),
        source: parts.source.to_vec(),
        pairs: parts.pairs.to_vec(),
        place: parts.place.to_vec(),
        homes: parts.homes.to_vec(),
    }
}

/// Experts 0, 1 on rank 0 and 2, 3 on rank 1. Token 0 has both its experts on rank 1 and travels once; token 1 goes to
/// both ranks; token 2 has one expert and one id that is nobody's.
#[test]
fn worked_by_hand() {
    let plan = plan(&[3, 2, 2, 0, 4, 1], 2, 4, 2);
    assert_eq!(plan.rows, [2, 2]);
    assert_eq!(plan.source, [1, 2, 0, 1, -1, -1]);
    assert_eq!(plan.pairs, [3, -1, 5, -1, 0, 1, 2, -1, -1, -1, -1, -1]);
    assert_eq!(plan.place, [4, 5, 6, 0, -1, 2]);
    assert_eq!(plan.homes, [2, -1, 0, 3, 1, -1]);
}

#[test]
fn one_rank_keeps_every_token_once() {
    let plan = plan(&[1, 0, 0, 0], 2, 2, 1);
    assert_eq!((plan.rows.as_slice(), plan.source.as_slice()), ([2].as_slice(), [0, 1].as_slice()));
    assert_eq!(plan.pairs, [0, 1, 2, 3]);
    assert_eq!(plan.homes, [0, 1]);
}

#[test]
fn an_idle_rank_and_repeated_experts() {
    let plan = plan(&[5, 5, 5, 4], 2, 6, 3);
    assert_eq!(plan.rows, [0, 0, 2]);
    assert_eq!(plan.source, [0, 1, -1, -1]);
    assert_eq!(plan.place, [0, 1, 2, 3]);
}

#[test]
fn nothing_to_send() {
    assert_eq!(plan(&[], 2, 4, 2).rows, [0, 0]);
    let none = plan(&[-1, 4, i64::MIN, i64::MAX], 2, 4, 2);
    assert_eq!((none.rows.as_slice(), none.homes.as_slice()), ([0, 0].as_slice(), [-1; 4].as_slice()));
    let without_slots = plan(&[], 0, 4, 2);
    assert_eq!((without_slots.rows.as_slice(), without_slots.homes.len()), ([0, 0].as_slice(), 0));
}

#[test]
fn counts_by_run_of_tokens() {
    let shape = Shape::new(3, 2, Ranks::new(4, 2).unwrap()).unwrap();
    let mut rows = [9; 4];
    // Runs of 1 and 2 tokens.
    assert_eq!(count_rows(&[3_i32, 2, 2, 0, 4, 1], &shape, &mut rows).unwrap(), 2);
    assert_eq!(rows, [0, 1, 2, 1]);
    let mut rows = [9; 10];
    assert_eq!(count_rows(&[3_u8, 0, 2, 0, 4, 1], &shape, &mut rows).unwrap(), 1);
    assert_eq!(rows, [0, 0, 1, 1, 0, 0, 1, 1, 1, 0]);
}

#[test]
fn ids_of_every_width_agree() {
    let shape = Shape::new(2, 2, Ranks::new(4, 2).unwrap()).unwrap();
    let mut wide = vec![0; shape.buffer_len()];
    let mut narrow = vec![0; shape.buffer_len()];
    plan_into(&[3_i64, -1, 0, 2], &shape, &mut wide).unwrap();
    plan_into(&[3_i8, -1, 0, 2], &shape, &mut narrow).unwrap();
    assert_eq!(wide, narrow);
}

#[test]
fn refusals() {
    for (experts, ranks) in [(6, 4), (4, 0), (0, 4), (2, 4)] {
        let error = Ranks::new(experts, ranks).unwrap_err();
        assert_eq!(error.kind, ErrorKind::LayoutError);
        assert_eq!(error.found.unwrap(), format!("{experts} experts, {ranks} ranks"));
    }
    let ranks = Ranks::new(8, 8).unwrap();
    assert!(Shape::new(1 << 28, 2, ranks).is_ok());
    assert!(Shape::new(1 << 29, 2, ranks).is_err());
    assert!(Shape::new(usize::MAX, 3, ranks).is_err());
    let shape = Shape::new(2, 2, ranks).unwrap();
    assert!(plan_into(&[1_i32; 3], &shape, &mut vec![0; shape.buffer_len()]).is_err());
    assert!(plan_into(&[1_i32; 4], &shape, &mut [0; 3]).is_err());
    assert!(count_rows(&[1_i32; 4], &shape, &mut [0; 7]).is_err());
    assert!(count_rows(&[1_i32; 4], &shape, &mut []).is_err());
}

/// Everything there is to know of a plan, over routings from a small generator.
#[test]
fn plans_are_permutations() {
    let mut state = 7_u64;
    let mut draw = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    for _ in 0..200 {
        let (tokens, slots, ranks) = (draw(20) as usize, 1 + draw(5) as usize, 1 + draw(6) as usize);
        let experts = ranks * (1 + draw(4) as usize);
        let ids: Vec<i64> = (0..tokens * slots).map(|_| draw(experts as u64 + 2) as i64 - 1).collect();
        let plan = plan(&ids, slots, experts, ranks);
        let share = (experts / ranks) as i64;
        let mut row = 0;
        for rank in 0..ranks as i64 {
            for _ in 0..plan.rows[rank as usize] {
                let token = plan.source[row];
                assert!(
                    plan.homes[token as usize * slots.min(ranks)..][..slots.min(ranks)]
                        .contains(&(row as i32))
                );
                let wanted: Vec<i32> = (token * slots as i32..(token + 1) * slots as i32)
                    .filter(|&pair| {
                        let id = ids[pair as usize];
                        (0..experts as i64).contains(&id) && id / share == rank
                    })
                    .collect();
                let found: Vec<i32> = plan.pairs[row * slots..(row + 1) * slots].to_vec();
                assert!(!wanted.is_empty());
                assert_eq!(found[..wanted.len()], wanted);
                assert!(found[wanted.len()..].iter().all(|&pair| pair == -1));
                for (place, &pair) in wanted.iter().enumerate() {
                    assert_eq!(plan.place[pair as usize] as usize, row * slots + place);
                }
                row += 1;
            }
        }
        assert!(plan.source[row..].iter().all(|&token| token == -1));
        assert_eq!(plan.homes.iter().filter(|&&home| home >= 0).count(), row);
        let nowhere = ids.iter().filter(|&&id| !(0..experts as i64).contains(&id)).count();
        assert_eq!(plan.place.iter().filter(|&&place| place < 0).count(), nowhere);
    }
}
