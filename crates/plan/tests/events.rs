//! Waits between lanes: enough for every conflict, and none too many.

use plimsoll_arch::DType;
use plimsoll_plan::{
    DeviceProfile, Host, Layout, Placement, Schedule, Waits, h200_profile, lay_out, schedule,
};
use plimsoll_program::{
    Class, Home, Op, OpKind, Phase, Program, Section, Shard, Tensor, TensorId, View,
};
use proptest::prelude::*;

const ELEMENTS: usize = 1 << 24;

fn tensor(name: &str, home: Home, resident: bool) -> Tensor {
    Tensor {
        name: name.to_owned(),
        shape: vec![ELEMENTS],
        dtype: DType::Bf16,
        class: Class::OptimizerState,
        home,
        shard: Shard::Whole,
        resident,
    }
}

fn op(kind: OpKind) -> Op {
    Op { kind, phase: Phase::Optimizer, workspace: None }
}

fn whole(t: usize) -> View {
    let tensor = TensorId::new(t);
    View { tensor, row: 0, col: 0, rows: 1, cols: ELEMENTS, stride: ELEMENTS }
}

fn up(from: usize, to: usize) -> Op {
    op(OpKind::ToDevice { from: whole(from), to: whole(to) })
}

fn down(from: usize, to: usize) -> Op {
    op(OpKind::ToHost { from: whole(from), to: whole(to) })
}

/// Reads the first, writes the second.
fn work(from: usize, to: usize) -> Op {
    op(OpKind::SwiGlu { gate_up: TensorId::new(from), act: TensorId::new(to) })
}

fn program(tensors: Vec<Tensor>, ops: Vec<Op>) -> Program {
    let all = 0..ops.len();
    Program { tensors, ops, sections: vec![Section { name: "all", ops: all, repeat: 1 }] }
}

#[test]
fn a_buffer_goes_round_with_one_wait_a_turn() {
    // 0, 1: host; 2, 3: buffers on the device; 4: what is computed with them.
    let tensors = vec![
        tensor("a", Home::Host, true),
        tensor("b", Home::Host, true),
        tensor("buffer 0", Home::Device, true),
        tensor("buffer 1", Home::Device, true),
        tensor("x", Home::Device, true),
    ];
    let ops = vec![
        up(0, 2),   // 0
        up(1, 3),   // 1
        work(4, 2), // 2: waits for 0
        down(2, 0), // 3: waits for 2
        work(4, 3), // 4: waits for 1
        up(0, 2),   // 5: waits for 3, and with it for 2
        down(3, 1), // 6: waits for 4
        work(4, 2), // 7: waits for 5
    ];
    let program = program(tensors, ops);
    let waits = Waits::new(&program, &lay_out(&program));
    let expected: [&[usize]; 8] = [&[], &[], &[0], &[2], &[1], &[3], &[4], &[5]];
    for (at, expected) in expected.into_iter().enumerate() {
        assert_eq!(waits.of(at), expected, "op {at}");
    }
    assert_eq!(waits.awaited(), [true, true, true, true, true, true, false, false]);
    assert_eq!(waits.launch_end(&program, 0, 8), 2);
}

#[test]
fn memory_handed_on_from_tensor_to_tensor_is_waited_for() {
    let tensors = vec![
        tensor("host", Home::Host, true),
        tensor("old", Home::Device, false),
        tensor("new", Home::Device, false),
        tensor("x", Home::Device, true),
    ];
    let program = program(tensors, vec![work(3, 1), down(1, 0), work(3, 2)]);
    let mut layout = lay_out(&program);
    assert_eq!(layout.offset(TensorId::new(1)), layout.offset(TensorId::new(2)));
    assert_eq!(Waits::new(&program, &layout).of(2), [1]);
    let elsewhere = Placement { offset: 1 << 40, bytes: 2 * ELEMENTS as u64 };
    layout.placements[2] = Some(elsewhere);
    assert!(Waits::new(&program, &layout).of(2).is_empty());
}

#[test]
fn pieces_of_a_part_are_apart_whichever_rank_has_it() {
    let part = ELEMENTS / 2;
    let padded =
        Tensor { shard: Shard::Padded { ranks: 2, part }, ..tensor("w", Home::Device, true) };
    let tensors = vec![tensor("host", Home::Host, true), padded, tensor("x", Home::Device, true)];
    let piece = |n: usize| View::of_part(TensorId::new(1), part, n * part / 2, part / 2);
    let slot = |n: usize| View { cols: part / 2, col: n * part / 2, ..whole(0) };
    let ops = vec![
        op(OpKind::ToHost { from: piece(0), to: slot(0) }),
        op(OpKind::ToDevice { from: slot(2), to: piece(1) }),
        op(OpKind::ToDevice { from: slot(3), to: piece(0) }), // 2: waits for 0
        work(1, 2),                                           // 3: of all of it
    ];
    let program = program(tensors, ops);
    let waits = Waits::new(&program, &lay_out(&program));
    let expected: [&[usize]; 4] = [&[], &[], &[0], &[2]];
    for (at, expected) in expected.into_iter().enumerate() {
        assert_eq!(waits.of(at), expected, "op {at}");
    }
}

#[test]
fn sections_join_all_lanes() {
    let tensors = vec![tensor("host", Home::Host, true), tensor("device", Home::Device, true)];
    let mut program = program(tensors, vec![up(0, 1), down(1, 0)]);
    assert_eq!(Waits::new(&program, &lay_out(&program)).of(1), [0]);
    program.sections = vec![
        Section { name: "up", ops: 0..1, repeat: 1 },
        Section { name: "down", ops: 1..2, repeat: 1 },
    ];
    assert!(Waits::new(&program, &lay_out(&program)).of(1).is_empty());
}

#[test]
fn copies_overlap_with_work_and_with_each_other() {
    let device = h200_profile();
    let home = |n| if n < 4 { Home::Host } else { Home::Device };
    let tensors: Vec<Tensor> = (0..8).map(|n| tensor(&format!("t{n}"), home(n), true)).collect();
    let copy = 1e-6 * device.launch_us;
    let (to, from) = (device.to_device_bytes_per_second, device.to_host_bytes_per_second);
    let bytes = 2.0 * ELEMENTS as f64;
    let (to, from) = (copy + bytes / to, copy + bytes / from);

    // Both ways at once, at 0.93 of the rate of one, and arithmetic that nothing hinders.
    let apart = program(tensors.clone(), vec![up(0, 4), down(5, 1), work(6, 7)]);
    let plan = schedule(&apart, &lay_out(&apart), device, None);
    let work_seconds = plan.ops[2].seconds;
    assert!(plan.ops.iter().all(|op| op.start == 0.0));
    let step = |plan: &Schedule| plan.step_seconds - 1e-6 * device.step_us;
    let (short, long) = (to.min(from), to.max(from));
    let crowded = short / 0.93 + (long - short);
    assert!((step(&plan) - crowded).abs() < 1e-9, "{} {crowded}", step(&plan));
    assert_eq!(plan.bottleneck, "link");

    // Two down beside one up: what is alone at the end has all of the rate.
    let uneven = program(tensors.clone(), vec![up(0, 4), down(5, 1), down(6, 2)]);
    let plan = schedule(&uneven, &lay_out(&uneven), device, None);
    let crowded = to / 0.93;
    assert!((plan.ops[0].seconds - crowded).abs() < 1e-9);
    assert!((step(&plan) - (crowded + 2.0 * from - to)).abs() < 1e-9, "{}", step(&plan));

    // A host whose memory two ranks share is what bounds both directions, not the link.
    let shared = DeviceProfile { host: Some(Host::of_gpu("h200", 2)), ..device.clone() };
    let plan = schedule(&apart, &lay_out(&apart), &shared, None);
    assert!((plan.ops[0].seconds - copy - bytes / 37.5e9).abs() < 1e-9);

    // In a chain nothing overlaps.
    let chain = program(tensors, vec![up(0, 4), work(4, 5), down(5, 1)]);
    let plan = schedule(&chain, &lay_out(&chain), device, None);
    let sum = to + work_seconds + from;
    assert!((plan.step_seconds - 1e-6 * device.step_us - sum).abs() < 1e-9);
}

/// A program of random copies and work between a few tensors that share memory.
fn any_program() -> impl Strategy<Value = (Program, Layout)> {
    let kinds = prop::collection::vec((0..3usize, 0..5usize, 0..6usize), 1..40);
    (kinds, prop::collection::vec(0..8u64, 11)).prop_map(|(kinds, places)| {
        let tensors: Vec<Tensor> = (0..11)
            .map(|n| {
                let home = if n < 5 { Home::Host } else { Home::Device };
                tensor(&format!("t{n}"), home, false)
            })
            .collect();
        let ops = kinds
            .into_iter()
            .map(|(kind, host, device)| match kind {
                0 => up(host, 5 + device),
                1 => down(5 + device, host),
                _ => work(5 + device, 5 + (device + 1 + host) % 6),
            })
            .collect();
        let program = program(tensors, ops);
        let mut layout = lay_out(&program);
        // Tensors overlap here and there, by half or wholly.
        for (place, at) in layout.placements.iter_mut().zip(places) {
            if let Some(place) = place {
                place.offset = at * ELEMENTS as u64;
            }
        }
        (program, layout)
    })
}

/// Bytes that an op touches, and whether it writes.
fn touches(program: &Program, layout: &Layout, op: usize) -> Vec<(Home, u64, u64, bool)> {
    let mut all = Vec::new();
    program.ops[op].for_each_tensor(|t, access| {
        let tensor = program.tensor(t);
        let start = layout.offset(t);
        let writes = access != plimsoll_program::Access::Read;
        all.push((tensor.home, start, start + tensor.bytes(), writes));
    });
    all
}

/// What has ended when each op starts, from lanes and waits alone.
fn ended_before(program: &Program, lists: &[Vec<usize>]) -> Vec<Vec<bool>> {
    let mut ended: Vec<Vec<bool>> = Vec::new();
    for (at, list) in lists.iter().enumerate() {
        let lane = program.lane(&program.ops[at].kind);
        let same = (0..at).rev().find(|op| program.lane(&program.ops[*op].kind) == lane);
        let mut before = vec![false; program.ops.len()];
        for op in list.iter().copied().chain(same) {
            before[op] = true;
            before.iter_mut().zip(&ended[op]).for_each(|(b, e)| *b |= e);
        }
        ended.push(before);
    }
    ended
}

proptest! {
    #[test]
    fn every_conflict_is_ordered_and_no_wait_is_idle((program, layout) in any_program()) {
        let waits = Waits::new(&program, &layout);
        let lists: Vec<Vec<usize>> =
            (0..program.ops.len()).map(|at| waits.of(at).to_vec()).collect();
        let ended = ended_before(&program, &lists);
        for (b, ended) in ended.iter().enumerate() {
            for (a, over) in ended.iter().enumerate().take(b) {
                let clash = touches(&program, &layout, a).iter().any(|x| {
                    touches(&program, &layout, b)
                        .iter()
                        .any(|y| x.0 == y.0 && x.1 < y.2 && y.1 < x.2 && (x.3 || y.3))
                });
                prop_assert!(!clash || *over, "{a} and {b} may run at once");
            }
            // Without any one of its waits an op would start too early.
            for skipped in 0..lists[b].len() {
                let mut fewer = lists.clone();
                let op = fewer[b].remove(skipped);
                prop_assert!(!ended_before(&program, &fewer)[b][op], "{b} need not name {op}");
            }
        }
    }
}
