//! The collectives over MPI against those of threads, bit for bit:
//! `mpirun -n 4 mpi_check`. Status 0 only if all agree.

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_comm::{Communicator, Mpi, threads};

/// What every rank has after a few collectives.
fn collectives(group: &mut dyn Communicator, elements: usize) -> Vec<Vec<u8>> {
    let (rank, ranks) = (group.rank(), group.ranks());
    let value = |i: usize| ((i * 37 + rank * 11) % 101) as f32 * 0.37 - 9.0;
    let mut x: Vec<f32> = (0..ranks * elements).map(value).collect();
    let mut y: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let mut z = x.clone();
    group.all_reduce(bytemuck::cast_slice_mut(&mut x), DType::F32).expect("sums");
    group.all_reduce(bytemuck::cast_slice_mut(&mut y), DType::Bf16).expect("sums");
    group.reduce_scatter(bytemuck::cast_slice_mut(&mut z), DType::F32).expect("parts of sums");
    group.all_gather(bytemuck::cast_slice_mut(&mut z)).expect("all parts");
    // One element, of which some ranks have no share.
    let mut one = [rank as f32 + 0.25];
    group.all_reduce(bytemuck::cast_slice_mut(&mut one), DType::F32).expect("a sum");
    let mut root = vec![rank as u8; elements];
    group.broadcast(&mut root, ranks - 1).expect("the last rank's");
    group.barrier().expect("all ranks");
    vec![
        bytemuck::cast_slice(&x).to_vec(),
        bytemuck::cast_slice(&y).to_vec(),
        bytemuck::cast_slice(&z).to_vec(),
        bytemuck::cast_slice(&one).to_vec(),
        root,
    ]
}

fn main() {
    let (mut group, session) = Mpi::start().expect("mpirun started this");
    let (rank, ranks) = (group.rank(), group.ranks());
    // The last is longer than what travels at a time.
    for elements in [1, 7, 4096, (4 << 20) + 99] {
        let found = collectives(&mut group, elements);
        let expected = std::thread::scope(|scope| {
            let all: Vec<_> = threads(ranks)
                .into_iter()
                .map(|mut group| scope.spawn(move || collectives(&mut group, elements)))
                .collect();
            let mut all = all.into_iter().map(|t| t.join().expect("a thread's collectives"));
            all.nth(rank).expect("a thread for each rank")
        });
        if found != expected {
            group.abort(&format!("{elements} elements: other bits than threads have"));
        }
    }
    if rank == 0 {
        println!("{ranks} ranks over MPI have the bits of threads");
    }
    drop((group, session));
}
