//! From which op to which op a tensor's bytes mean something.

use plimsoll_program::Program;

/// First and last op (inclusive) during which a tensor needs its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    pub first: usize,
    pub last: usize,
}

impl Lifetime {
    pub fn overlaps(self, other: Lifetime) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// The lifetime of every tensor; `None` for one that no op touches and that
/// does not survive the step.
///
/// A section that repeats runs its ops again, so a tensor that enters or
/// leaves it must live through all of it.
pub fn lifetimes(program: &Program) -> Vec<Option<Lifetime>> {
    let end = program.ops.len().saturating_sub(1);
    let mut lives: Vec<Option<Lifetime>> = program
        .tensors
        .iter()
        .map(|t| t.resident.then_some(Lifetime { first: 0, last: end }))
        .collect();
    for (op, entry) in program.ops.iter().enumerate() {
        entry.for_each_tensor(|t, _| {
            let life = lives[t.index()].get_or_insert(Lifetime { first: op, last: op });
            life.first = life.first.min(op);
            life.last = life.last.max(op);
        });
    }
    for section in program.sections.iter().filter(|s| s.repeat > 1 && !s.ops.is_empty()) {
        let (start, stop) = (section.ops.start, section.ops.end - 1);
        for life in lives.iter_mut().flatten() {
            let outside = life.first < start || life.last > stop;
            if outside && life.overlaps(Lifetime { first: start, last: stop }) {
                life.first = life.first.min(start);
                life.last = life.last.max(stop);
            }
        }
    }
    lives
}

#[cfg(test)]
mod tests {
    use plimsoll_arch::DType;
    use plimsoll_program::{Class, Home, Op, OpKind, Phase, Section, Shard, Tensor, TensorId};

    use super::*;

    #[test]
    fn a_tensor_carried_through_a_repeated_section_lives_through_all_of_it() {
        let tensor = |name: &str| Tensor {
            name: name.into(),
            shape: vec![4],
            dtype: DType::F32,
            class: Class::Activation,
            home: Home::Device,
            shard: Shard::Whole,
            resident: false,
        };
        let add = |from: usize, to: usize| Op {
            kind: OpKind::SumLosses {
                losses: TensorId::new(from),
                step: TensorId::new(from),
                total: TensorId::new(to),
                accumulate: true,
            },
            phase: Phase::Forward,
            workspace: None,
        };
        let program = Program {
            tensors: ["a", "b", "c", "inner"].map(tensor).to_vec(),
            ops: vec![add(0, 1), add(0, 3), add(3, 1), add(0, 2), add(1, 2)],
            sections: vec![
                Section { name: "first", ops: 0..1, repeat: 1 },
                Section { name: "rest", ops: 1..4, repeat: 3 },
                Section { name: "last", ops: 4..5, repeat: 1 },
            ],
        };
        let lives = lifetimes(&program);
        assert_eq!(lives[0], Some(Lifetime { first: 0, last: 3 }));
        assert_eq!(lives[1], Some(Lifetime { first: 0, last: 4 }));
        assert_eq!(lives[2], Some(Lifetime { first: 1, last: 4 }));
        assert_eq!(lives[3], Some(Lifetime { first: 1, last: 2 }));
    }
}
