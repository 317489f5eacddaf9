//! Slurm's compressed lists of nodes: `node[01-03,07],login,gpu-[1-2]-[a]`... as
//! `scontrol show hostnames` expands them.

/// A list that is no list of nodes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{list}` is no list of nodes ({reason}): Slurm writes such as node[01-03,07],login")]
pub struct NodeListError {
    pub list: String,
    pub reason: &'static str,
}

/// More nodes than any cluster has: a list that long is a mistake.
const MAX_NODES: usize = 1 << 20;

/// Every node of a list, in its order. A name may hold several brackets; the last one
/// counts fastest. Numbers keep the zeros in front that the list gives them.
///
/// # Errors
/// Brackets that do not match, an empty name or range, a range that falls.
pub fn expand_node_list(list: &str) -> Result<Vec<String>, NodeListError> {
    let wrong = |reason| NodeListError { list: list.to_owned(), reason };
    let mut nodes = Vec::new();
    for name in split(list).map_err(wrong)? {
        let mut all = vec![String::new()];
        let mut rest = name;
        while let Some((before, after)) = rest.split_once('[') {
            let (inside, behind) = after.split_once(']').ok_or_else(|| wrong("a [ without ]"))?;
            let suffixes = expand_ranges(inside).map_err(wrong)?;
            if all.len().saturating_mul(suffixes.len()) > MAX_NODES {
                return Err(wrong("too many nodes"));
            }
            all = all
                .iter()
                .flat_map(|a| suffixes.iter().map(move |s| format!("{a}{before}{s}")))
                .collect();
            rest = behind;
        }
        nodes.extend(all.into_iter().map(|a| a + rest));
        if nodes.len() > MAX_NODES {
            return Err(wrong("too many nodes"));
        }
    }
    Ok(nodes)
}

/// The names of a list: split at the commas outside of brackets.
fn split(list: &str) -> Result<Vec<&str>, &'static str> {
    let (mut names, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("a [ inside of brackets"),
            b'[' => inside = true,
            b']' if !inside => return Err("a ] without ["),
            b']' => inside = false,
            b',' if !inside => {
                names.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a [ without ]");
    }
    names.push(&list[start..]);
    if names.iter().any(|n| n.is_empty()) {
        return Err("an empty name");
    }
    Ok(names)
}

/// `01-03,07` as 01, 02, 03, 07.
fn expand_ranges(ranges: &str) -> Result<Vec<String>, &'static str> {
    let mut all = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            let value = text.parse::<u64>().ok().filter(|_| digits);
            value.ok_or("a range that is no number")
        };
        let (from, to) = (number(first)?, number(last)?);
        if to < from {
            return Err("a range that falls");
        }
        if to - from >= MAX_NODES as u64 {
            return Err("too many nodes");
        }
        let width = first.len();
        all.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_expand_as_scontrol_expands_them() {
        let cases = [
            ("n1", "n1"),
            ("n[1-2]", "n1 n2"),
            ("node[01-03,07]", "node01 node02 node03 node07"),
            ("node[01-03,07],login,x[9-11]", "node01 node02 node03 node07 login x9 x10 x11"),
            (
                "rack[1-2]gpu[08-10]",
                "rack1gpu08 rack1gpu09 rack1gpu10 rack2gpu08 rack2gpu09 rack2gpu10",
            ),
            ("a[0098-0101].cluster", "a0098.cluster a0099.cluster a0100.cluster a0101.cluster"),
            ("gpu-a-[3]", "gpu-a-3"),
        ];
        for (list, expected) in cases {
            assert_eq!(expand_node_list(list).unwrap().join(" "), expected, "{list}");
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for list in [
            "",
            ",",
            "a,,b",
            "n[1-2",
            "n1-2]",
            "n[[1]]",
            "n[]",
            "n[a-b]",
            "n[3-1]",
            "n[1-]",
            "n[-1]",
            "n[1-99999999999]",
            "n[0-1023][0-1023][0-1023]",
            "n[1,,2]",
            "n[+1]",
        ] {
            assert!(expand_node_list(list).is_err(), "{list}");
        }
    }
}
