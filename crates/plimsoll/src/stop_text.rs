//! Ends a text where a given string begins, as it comes piece by piece.

/// Strings that end a generation. What may be the beginning of one is held back until it
/// is known whether it is.
#[derive(Clone, Debug, Default)]
pub struct StopText {
    stops: Vec<String>,
    held: String,
    found: bool,
}

impl StopText {
    /// Empty strings end nothing.
    pub fn new(stops: &[String]) -> StopText {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopText { stops, ..StopText::default() }
    }

    /// Whether a string was found; nothing comes out after it.
    pub fn found(&self) -> bool {
        self.found
    }

    /// Takes the next piece of the text; returns what belongs to it for certain.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s)).min() {
            self.found = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins = |at: &usize| self.stops.iter().any(|s| s.starts_with(&self.held[*at..]));
        let open = self.held.char_indices().map(|(at, _)| at).find(begins);
        let rest = self.held.split_off(open.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back and turned out to be text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut stop = StopText::new(&stops);
        let mut text: String = pieces.iter().map(|p| stop.push(p)).collect();
        text.push_str(&stop.finish());
        (text, stop.found())
    }

    #[test]
    fn the_text_ends_before_the_first_of_them() {
        assert_eq!(all(&["\n\n", "END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(all(&["END", "\n"], &["one\ntwo END"]), ("one".into(), true));
        assert_eq!(all(&["é!"], &["caf", "é", "! no"]), ("caf".into(), true));
    }

    #[test]
    fn what_only_looks_like_one_is_text() {
        assert_eq!(all(&["END"], &["EN", "EN", "x"]), ("ENENx".into(), false));
        assert_eq!(all(&["aab"], &["a", "a", "a", "c"]), ("aaac".into(), false));
        assert_eq!(all(&["END"], &["the EN"]), ("the EN".into(), false));
        assert_eq!(all(&[""], &["x"]), ("x".into(), false));
    }
}
