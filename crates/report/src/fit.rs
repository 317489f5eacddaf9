//! A straight line through points, by least squares.

/// `y = intercept + slope * x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    pub intercept: f64,
    pub slope: f64,
    /// Share of the variance of `y` that the line explains, 1 at best.
    pub r2: f64,
    /// Number of points.
    pub count: usize,
}

impl Fit {
    /// `None` for fewer than three different `x`: a line through two points
    /// says nothing about a third.
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        let mut xs: Vec<f64> = points.iter().map(|p| p.0).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        if xs.len() < 3 || points.iter().any(|p| !p.0.is_finite() || !p.1.is_finite()) {
            return None;
        }
        let n = points.len() as f64;
        let mean_x = points.iter().map(|p| p.0).sum::<f64>() / n;
        let mean_y = points.iter().map(|p| p.1).sum::<f64>() / n;
        // Around the means: with bytes, squares of the raw values lose digits.
        let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
        for (x, y) in points {
            let (dx, dy) = (x - mean_x, y - mean_y);
            xx += dx * dx;
            xy += dx * dy;
            yy += dy * dy;
        }
        let slope = xy / xx;
        let residual: f64 =
            points.iter().map(|(x, y)| (y - mean_y - slope * (x - mean_x)).powi(2)).sum();
        Some(Self {
            intercept: mean_y - slope * mean_x,
            slope,
            // Constant points lie on their line.
            r2: if yy > 0.0 { 1.0 - residual / yy } else { 1.0 },
            count: points.len(),
        })
    }

    /// The line at `x`.
    pub fn at(&self, x: f64) -> f64 {
        self.intercept + self.slope * x
    }
}

/// The first of the last points that leave the line of those before them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kink {
    pub x: f64,
    pub y: f64,
    /// Where the line would be.
    pub expected: f64,
    /// The line of the points before.
    pub fit: Fit,
}

/// At most this many points make a kink; more are another regime.
const LAST: usize = 3;

impl Kink {
    /// `points` are in the order of their x, one for each. A kink takes at least
    /// four points on the line, and up to three after them that all leave it to
    /// the same side by 2 % and three times as far as any of the others.
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        let n = points.len();
        (n.saturating_sub(LAST).max(4)..n).find_map(|first| {
            let fit = Fit::of(&points[..first])?;
            let off = |p: &(f64, f64)| p.1 - fit.at(p.0);
            let noise = points[..first].iter().map(|p| off(p).abs()).fold(0.0, f64::max);
            let side = off(&points[first]).signum();
            let leaves = |p: &(f64, f64)| {
                let d = off(p) * side;
                d > 3.0 * noise && d > 0.02 * fit.at(p.0).abs()
            };
            let (x, y) = points[first];
            points[first..].iter().all(leaves).then(|| Self { x, y, expected: fit.at(x), fit })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let exact = Fit::of(&[(1.0, 5.0), (2.0, 7.0), (3.0, 9.0)]).unwrap();
        assert_eq!((exact.intercept, exact.slope, exact.r2), (3.0, 2.0, 1.0));
        assert_eq!(exact.at(10.0), 23.0);
        // By hand: mean (2, 2), slope 0.5, residuals -0.5, 1, -0.5.
        let rough = Fit::of(&[(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]).unwrap();
        assert!((rough.slope - 0.5).abs() < 1e-12 && (rough.r2 - 0.25).abs() < 1e-12);
        let flat = Fit::of(&[(1.0, 4.0), (2.0, 4.0), (9.0, 4.0)]).unwrap();
        assert_eq!((flat.slope, flat.r2), (0.0, 1.0));
    }

    #[test]
    fn too_few() {
        assert_eq!(Fit::of(&[]), None);
        assert_eq!(Fit::of(&[(1.0, 1.0), (2.0, 2.0), (2.0, 3.0)]), None);
        assert_eq!(Fit::of(&[(1.0, 1.0), (2.0, f64::NAN), (3.0, 3.0)]), None);
    }

    #[test]
    fn kinks() {
        let line = |x: f64| (x, 3.0 + 2.0 * x + 0.01 * (x * 7.0).sin());
        let mut points: Vec<(f64, f64)> = (1..=16).map(|i| line(f64::from(i))).collect();
        assert_eq!(Kink::of(&points), None);
        points.push((17.0, 41.0));
        let kink = Kink::of(&points).unwrap();
        assert_eq!((kink.x, kink.y, kink.fit.count), (17.0, 41.0, 16));
        assert!((kink.expected - 37.0).abs() < 0.1);
        points.push((18.0, 43.5));
        assert_eq!(Kink::of(&points).unwrap().x, 17.0);
        // Back on the line: not the last points.
        points.push((19.0, 41.0));
        assert_eq!(Kink::of(&points), None);
        let curve: Vec<(f64, f64)> = (1..=20).map(|i| (f64::from(i), f64::from(i * i))).collect();
        assert_eq!(Kink::of(&curve), None);
        assert_eq!(Kink::of(&points[..4]), None);
    }
}
