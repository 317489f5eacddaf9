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
}
