//! The likeliest token.

/// The index of the largest of `logits`: the first of several; NaN is passed over.
pub fn argmax(logits: &[f32]) -> i32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, logit) in logits.iter().enumerate() {
        if *logit > best.0 {
            best = (*logit, token as i32);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::argmax;

    #[test]
    fn the_first_of_the_largest_and_no_nan() {
        assert_eq!(argmax(&[1.0, f32::NAN, 3.0, 3.0, -1.0]), 2);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 0);
    }
}
