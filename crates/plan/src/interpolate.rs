//! Between measured points: times are straight lines where both axes are
//! logarithmic, which is exact for anything proportional to a power of a size.
//!
//! Below the first point of an axis the time stays what it is there (a launch
//! costs the same however little it does); beyond the last one it grows with the
//! size (the rate has levelled off). Tables never fall along an axis, so more
//! work never costs less.

/// Where a size lies on an ascending axis.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Position {
    /// The point at or below it.
    low: usize,
    /// How far it is to the next one, 0 to 1, in logarithms.
    fraction: f64,
    /// How many times as large as the last point it is; 1 inside of the axis.
    beyond: f64,
}

impl Position {
    fn on(axis: &[f64], size: f64) -> Position {
        let last = axis.len() - 1;
        if size >= axis[last] {
            return Position { low: last, fraction: 0.0, beyond: size / axis[last] };
        }
        let high = axis.partition_point(|a| *a <= size);
        if high == 0 {
            return Position { low: 0, fraction: 0.0, beyond: 1.0 };
        }
        let (a, b) = (axis[high - 1], axis[high]);
        Position { low: high - 1, fraction: (size / a).ln() / (b / a).ln(), beyond: 1.0 }
    }
}

/// The value of a table at a size on each axis. The table is row-major: the last
/// axis is contiguous.
///
/// # Panics
/// The table has not one positive value for each combination of points.
pub(crate) fn interpolate<const N: usize>(
    axes: [&[f64]; N],
    table: &[f64],
    sizes: [f64; N],
) -> f64 {
    let mut positions = [Position { low: 0, fraction: 0.0, beyond: 1.0 }; N];
    for n in 0..N {
        positions[n] = Position::on(axes[n], sizes[n]);
    }
    let mut logarithm = 0.0;
    for corner in 0..1usize << N {
        let (mut weight, mut index) = (1.0, 0);
        for (n, p) in positions.iter().enumerate() {
            let high = corner >> n & 1;
            weight *= if high == 1 { p.fraction } else { 1.0 - p.fraction };
            index = index * axes[n].len() + (p.low + high).min(axes[n].len() - 1);
        }
        if weight > 0.0 {
            logarithm += weight * table[index].ln();
        }
    }
    logarithm.exp() * positions.iter().map(|p| p.beyond).product::<f64>()
}

/// Raises values so that none is below one at smaller sizes: what noise did to
/// a measurement, more work must not cost less.
pub(crate) fn make_monotone(lengths: &[usize], table: &mut [f64]) {
    let mut stride = table.len();
    for length in lengths {
        stride /= length;
        for i in 0..table.len() {
            if !(i / stride).is_multiple_of(*length) {
                table[i] = table[i].max(table[i - stride]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn measured_points_are_met_and_powers_between_them_are_exact() {
        let axis = [1.0, 10.0, 100.0];
        let table = axis.map(|x: f64| 3.0 * x.powf(0.7));
        for x in [1.0, 2.0, 10.0, 55.0, 100.0] {
            let value = interpolate([&axis], &table, [x]);
            assert!((value / (3.0 * x.powf(0.7)) - 1.0).abs() < 1e-12, "{x}: {value}");
        }
        assert!((interpolate([&axis], &table, [0.1]) - table[0]).abs() < 1e-12);
        assert!((interpolate([&axis], &table, [400.0]) / (4.0 * table[2]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_last_axis_is_contiguous() {
        let (rows, cols) = ([1.0, 2.0], [1.0, 10.0, 100.0]);
        let table = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert!((interpolate([&rows, &cols], &table, [2.0, 10.0]) - 5.0).abs() < 1e-12);
        assert!((interpolate([&rows, &cols], &table, [1.0, 100.0]) - 3.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn more_never_costs_less(
            mut table in prop::collection::vec(0.1f64..10.0, 24),
            x in 0.5f64..2000.0, y in 0.5f64..2000.0, z in 0.5f64..2000.0, more in 1.0f64..3.0,
        ) {
            let axes: [&[f64]; 3] = [&[1.0, 30.0], &[1.0, 16.0, 64.0], &[2.0, 9.0, 400.0, 1000.0]];
            make_monotone(&[2, 3, 4], &mut table);
            let least = interpolate(axes, &table, [x, y, z]) * (1.0 - 1e-12);
            prop_assert!(interpolate(axes, &table, [x * more, y, z]) >= least);
            prop_assert!(interpolate(axes, &table, [x, y * more, z]) >= least);
            prop_assert!(interpolate(axes, &table, [x, y, z * more]) >= least);
        }
    }
}
