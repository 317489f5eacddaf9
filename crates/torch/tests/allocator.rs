//! Every rule of the caching allocator, one test each.

use plimsoll_torch::{AllocatorConfig, CachingAllocator, Stats};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn plain() -> CachingAllocator {
    CachingAllocator::new(AllocatorConfig::default())
}

fn expandable() -> CachingAllocator {
    let config = AllocatorConfig { expandable_segments: true, ..AllocatorConfig::default() };
    CachingAllocator::new(config)
}

fn reserved(a: &CachingAllocator) -> u64 {
    a.stats().reserved.current
}

#[test]
fn requests_are_rounded_to_512_bytes() {
    let a = plain();
    assert_eq!([a.round(1), a.round(512), a.round(513)], [512, 512, 1024]);
}

#[test]
fn roundup_power2_divisions_rounds_to_fractions_of_a_power() {
    let config = AllocatorConfig { roundup_power2_divisions: 4, ..AllocatorConfig::default() };
    let a = CachingAllocator::new(config);
    // Between 1024 and 2048: 1280, 1536, 1792, 2048; small sizes and powers stay.
    assert_eq!(a.round(1200), 1536);
    assert_eq!(a.round(4 * KIB), 4 * KIB);
    assert_eq!(a.round(4 * KIB + 1), 5 * KIB);
    assert_eq!(a.round(7 * MIB + 1), 8 * MIB);
}

#[test]
fn small_tensors_share_segments_of_2_mib() {
    let mut a = plain();
    for _ in 0..2 {
        a.allocate(MIB, 0).unwrap();
    }
    assert_eq!(reserved(&a), 2 * MIB);
    a.allocate(1, 0).unwrap();
    assert_eq!((reserved(&a), a.stats().allocated.current), (4 * MIB, 2 * MIB + 512));
}

#[test]
fn tensors_of_1_to_10_mib_share_segments_of_20_mib() {
    let mut a = plain();
    a.allocate(MIB + 1, 0).unwrap();
    assert_eq!(reserved(&a), 20 * MIB);
    a.allocate(9 * MIB, 0).unwrap();
    a.allocate(9 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 20 * MIB);
    a.allocate(9 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 40 * MIB);
}

#[test]
fn large_tensors_get_multiples_of_2_mib() {
    let mut a = plain();
    a.allocate(10 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 10 * MIB);
    a.allocate(11 * MIB + 1, 0).unwrap();
    assert_eq!(reserved(&a), 22 * MIB);
}

#[test]
fn a_remainder_of_1_mib_is_not_split_and_counts() {
    let mut a = plain();
    a.allocate(11 * MIB, 0).unwrap();
    assert_eq!(a.stats().allocated.current, 12 * MIB);
    assert_eq!(a.stats().requested.current, 11 * MIB);
    // One byte less leaves more than 1 MiB: that is split off.
    let mut a = plain();
    a.allocate(11 * MIB - 512, 0).unwrap();
    assert_eq!(a.stats().allocated.current, 11 * MIB - 512);
}

#[test]
fn the_smallest_block_that_fits_is_taken() {
    let mut a = plain();
    let large = a.allocate(64 * MIB, 0).unwrap();
    let medium = a.allocate(32 * MIB, 0).unwrap();
    a.free(large);
    a.free(medium);
    a.allocate(30 * MIB, 0).unwrap();
    // The 64 MiB block is still whole.
    a.allocate(64 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 96 * MIB);
}

#[test]
fn freed_neighbours_merge() {
    let mut a = plain();
    let blocks: Vec<_> = (0..4).map(|_| a.allocate(5 * MIB, 0).unwrap()).collect();
    assert_eq!(reserved(&a), 20 * MIB);
    for block in [blocks[1], blocks[3], blocks[0], blocks[2]] {
        a.free(block);
    }
    a.allocate(20 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 20 * MIB);
}

#[test]
fn blocks_never_move_between_streams() {
    let mut a = plain();
    let block = a.allocate(32 * MIB, 0).unwrap();
    a.free(block);
    a.allocate(32 * MIB, 1).unwrap();
    assert_eq!(reserved(&a), 64 * MIB);
}

#[test]
fn a_recorded_block_is_active_until_its_stream_has_passed() {
    let mut a = plain();
    let block = a.allocate(32 * MIB, 0).unwrap();
    a.free_recorded(block);
    assert_eq!((a.stats().allocated.current, a.stats().active.current), (0, 32 * MIB));
    let other = a.allocate(32 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 64 * MIB);
    a.finish(block);
    a.free(other);
    assert_eq!((a.stats().active.current, a.stats().active.peak), (0, 64 * MIB));
}

#[test]
fn nothing_shrinks_until_the_cache_is_emptied() {
    let mut a = plain();
    let [one, two] = [(); 2].map(|()| a.allocate(16 * MIB, 0).unwrap());
    a.free(one);
    assert_eq!(reserved(&a), 32 * MIB);
    a.empty_cache();
    assert_eq!(reserved(&a), 16 * MIB);
    a.free(two);
    a.empty_cache();
    assert_eq!((reserved(&a), a.stats().reserved.peak), (0, 32 * MIB));
}

#[test]
fn a_segment_with_one_live_block_stays() {
    let mut a = plain();
    let first = a.allocate(5 * MIB, 0).unwrap();
    a.allocate(5 * MIB, 0).unwrap();
    a.free(first);
    a.empty_cache();
    assert_eq!(reserved(&a), 20 * MIB);
    assert_eq!(a.stats().pinned.current, 20 * MIB);
}

#[test]
fn without_memory_the_cache_is_released_and_then_it_is_over() {
    let config = AllocatorConfig { limit: Some(100 * MIB), ..AllocatorConfig::default() };
    let mut a = CachingAllocator::new(config);
    let block = a.allocate(60 * MIB, 0).unwrap();
    a.free(block);
    a.allocate(80 * MIB, 0).unwrap();
    assert_eq!((reserved(&a), a.stats().retries), (80 * MIB, 1));
    let error = a.allocate(30 * MIB, 0).unwrap_err();
    assert_eq!((error.requested, error.reserved, error.limit), (30 * MIB, 80 * MIB, 100 * MIB));
}

#[test]
fn max_split_size_keeps_large_blocks_whole() {
    let config = AllocatorConfig { max_split_size: Some(50 * MIB), ..AllocatorConfig::default() };
    let mut a = CachingAllocator::new(config);
    let block = a.allocate(80 * MIB, 0).unwrap();
    a.free(block);
    // Too small for the oversize block, so it gets a segment of its own.
    a.allocate(30 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 110 * MIB);
    // An oversize request may waste up to 20 MiB, and takes the block unsplit.
    a.allocate(70 * MIB, 0).unwrap();
    assert_eq!((reserved(&a), a.stats().allocated.current), (110 * MIB, 110 * MIB));
}

#[test]
fn expandable_segments_reserve_the_pages_that_are_touched() {
    let mut a = expandable();
    a.allocate(5 * MIB, 0).unwrap();
    a.allocate(30 * MIB, 0).unwrap();
    // 35 MiB in pages of 20.
    assert_eq!(reserved(&a), 40 * MIB);
    a.allocate(KIB, 0).unwrap();
    assert_eq!(reserved(&a), 42 * MIB);
    // Nothing is left unsplit.
    assert_eq!(a.stats().allocated.current, 35 * MIB + KIB);
}

#[test]
fn expandable_segments_grow_a_free_tail() {
    let mut a = expandable();
    let block = a.allocate(20 * MIB, 0).unwrap();
    a.free(block);
    a.allocate(50 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 60 * MIB);
}

#[test]
fn expandable_segments_give_back_whole_pages_only() {
    let mut a = expandable();
    let first = a.allocate(30 * MIB, 0).unwrap();
    let second = a.allocate(30 * MIB, 0).unwrap();
    a.free(first);
    assert_eq!(a.stats().pinned.current, 40 * MIB);
    a.empty_cache();
    // The page that both touch stays.
    assert_eq!(reserved(&a), 40 * MIB);
    // The hole is mapped again before the end grows.
    a.allocate(25 * MIB, 0).unwrap();
    assert_eq!(reserved(&a), 60 * MIB);
    a.free(second);
}

#[test]
fn peaks_are_reset() {
    let mut a = plain();
    let block = a.allocate(32 * MIB, 0).unwrap();
    a.free(block);
    a.reset_peaks();
    let Stats { allocated, reserved, .. } = a.stats();
    assert_eq!((allocated.peak, reserved.peak), (0, 32 * MIB));
}

/// Random traffic: counters agree with what is live, and everything comes back.
#[test]
fn books_are_kept_under_random_traffic() {
    for expandable_segments in [false, true] {
        let config = AllocatorConfig { expandable_segments, ..AllocatorConfig::default() };
        let mut a = CachingAllocator::new(config);
        let mut live = Vec::new();
        let mut seed = 7u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let pick = seed >> 33;
            if pick % 5 < 2 && !live.is_empty() {
                let (block, bytes): (_, u64) = live.swap_remove(pick as usize % live.len());
                let before = a.stats().requested.current;
                a.free(block);
                assert_eq!(before - a.stats().requested.current, bytes);
            } else {
                let bytes = 1 + (pick % (1 << (pick % 26)));
                live.push((a.allocate(bytes, (pick % 3) as u8).unwrap(), bytes));
            }
            if pick.is_multiple_of(512) {
                a.empty_cache();
            }
            let s = a.stats();
            assert!(s.requested.current <= s.allocated.current);
            assert!(s.allocated.current <= s.pinned.current);
            assert!(s.pinned.current <= s.reserved.current);
        }
        for (block, _) in live.drain(..) {
            a.free(block);
        }
        let s = a.stats();
        assert_eq!((s.allocated.current, s.active.current, s.pinned.current), (0, 0, 0));
        a.empty_cache();
        assert_eq!(reserved(&a), 0);
    }
}
