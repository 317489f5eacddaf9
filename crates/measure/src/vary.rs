//! What a sweep varies: `batch=1..`, `batch=1..16`, `seq=128..2048:128`,
//! `batch=1,2,4,8`, `recompute=none,mlp,block`.

use serde_json::Value;

/// One axis of a sweep: a name and its values, possibly without end.
#[derive(Clone, Debug, PartialEq)]
pub struct Vary {
    name: String,
    values: Values,
}

#[derive(Clone, Debug, PartialEq)]
enum Values {
    /// `first`, `first + step`, ... up to and including `last`.
    Range {
        first: u64,
        last: Option<u64>,
        step: u64,
    },
    List(Vec<Value>),
}

/// A `--vary` that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot vary `{text}`: {reason}; write for example batch=1.. or batch=1..16 or \
     seq=128..2048:128 or batch=1,2,4,8"
)]
pub struct VaryError {
    text: String,
    reason: String,
}

impl Vary {
    /// Reads one axis. Both ends of a range belong to it; the step after the
    /// colon is 1 if left out. The elements of a list are numbers or words,
    /// each once.
    pub fn parse(text: &str) -> Result<Self, VaryError> {
        let bad = |reason: String| VaryError { text: text.to_owned(), reason };
        let (name, values) =
            text.split_once('=').ok_or_else(|| bad("there is no `=`".to_owned()))?;
        let name = name.trim();
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || !name.chars().all(valid) {
            return Err(bad(format!("`{name}` is not the name of a setting")));
        }
        let number = |digits: &str| -> Result<u64, VaryError> {
            let digits = digits.trim();
            digits.parse().map_err(|_| bad(format!("`{digits}` is not a whole number")))
        };

        let values = if let Some((first, rest)) = values.split_once("..") {
            let (last, step) = match rest.split_once(':') {
                Some((last, step)) => (last, number(step)?),
                None => (rest, 1),
            };
            let first = number(first)?;
            let last = match last.trim() {
                "" => None,
                last => Some(number(last)?),
            };
            if step == 0 {
                return Err(bad("a step of 0 never gets anywhere".to_owned()));
            }
            if let Some(last) = last.filter(|&last| last < first) {
                return Err(bad(format!("{last} is less than {first}")));
            }
            Values::Range { first, last, step }
        } else {
            let mut list = Vec::new();
            for item in values.split(',').map(str::trim) {
                let value = match item.parse::<u64>() {
                    Ok(number) => Value::from(number),
                    Err(_) if item.is_empty() => {
                        return Err(bad("a value is missing".to_owned()));
                    }
                    Err(_) => Value::from(item),
                };
                if list.contains(&value) {
                    return Err(bad(format!("{item} is there twice")));
                }
                list.push(value);
            }
            Values::List(list)
        };
        Ok(Self { name: name.to_owned(), values })
    }

    /// The setting that is varied.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The values in order; without end if [`Vary::len`] is `None`.
    pub fn values(&self) -> Box<dyn Iterator<Item = Value> + '_> {
        match &self.values {
            Values::Range { first, last, step } => {
                let last = last.unwrap_or(u64::MAX);
                let next = move |value: &u64| value.checked_add(*step).filter(|&v| v <= last);
                Box::new(std::iter::successors(Some(*first), next).map(Value::from))
            }
            Values::List(list) => Box::new(list.iter().cloned()),
        }
    }

    /// How many values there are; `None` if there is no end.
    #[expect(clippy::len_without_is_empty, reason = "an axis is never empty")]
    pub fn len(&self) -> Option<u64> {
        match &self.values {
            Values::Range { first, last, step } => last.map(|last| (last - first) / step + 1),
            Values::List(list) => Some(list.len() as u64),
        }
    }

    /// Every value is a number larger than the one before, so that a value
    /// beyond one that did not fit will not fit either.
    pub fn is_ascending(&self) -> bool {
        match &self.values {
            Values::Range { .. } => true,
            Values::List(list) => {
                let numbers: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
                numbers.is_some_and(|numbers| numbers.is_sorted())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Vec<Value> {
        Vary::parse(text).unwrap().values().take(5).collect()
    }

    #[test]
    fn ranges_and_lists() {
        assert_eq!(values("batch=1.."), [1, 2, 3, 4, 5]);
        assert_eq!(values("batch=1..3"), [1, 2, 3]);
        assert_eq!(values("batch=4..4"), [4]);
        assert_eq!(values("seq=128..2048:512"), [128, 640, 1152, 1664]);
        assert_eq!(values("seq=128..:64"), [128, 192, 256, 320, 384]);
        assert_eq!(values("batch=8, 2 ,4"), [8, 2, 4]);
        assert_eq!(values("recompute=none,mlp"), ["none", "mlp"]);
        let edge = format!("n={}..", u64::MAX - 1);
        assert_eq!(values(&edge), [u64::MAX - 1, u64::MAX]);
    }

    #[test]
    fn length_and_order() {
        let of = |text| {
            let vary = Vary::parse(text).unwrap();
            (vary.len(), vary.is_ascending())
        };
        assert_eq!(of("batch=1.."), (None, true));
        assert_eq!(of("seq=128..2048:128"), (Some(16), true));
        assert_eq!(of("batch=1,2,4"), (Some(3), true));
        assert_eq!(of("batch=4,2"), (Some(2), false));
        assert_eq!(of("recompute=none,mlp"), (Some(2), false));
        assert_eq!(Vary::parse("batch=1..").unwrap().name(), "batch");
    }

    #[test]
    fn every_error_names_the_text_and_shows_an_example() {
        for text in [
            "",
            "batch",
            "=1..",
            "ba tch=1",
            "batch=",
            "batch=1,,2",
            "batch=1,1",
            "batch=..4",
            "batch=5..4",
            "batch=1..x",
            "batch=1..8:0",
            "batch=1..8:",
            "batch=-1..4",
            "batch=1...4",
            "batch=1..99999999999999999999",
        ] {
            let error = Vary::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
            assert!(error.contains("batch=1..16"), "{error}");
        }
    }
}
