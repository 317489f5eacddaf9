//! Numbers as people read them. Bytes are binary units in tables, plain bytes
//! in JSON.

const MIB: f64 = (1u64 << 20) as f64;
const GIB: f64 = (1u64 << 30) as f64;

/// `12.34 GiB`, or `56.7 MiB` below one.
pub fn bytes(n: u64) -> String {
    let n = n as f64;
    if n >= GIB {
        format!("{:.2} GiB", n / GIB)
    } else if n >= MIB {
        format!("{:.1} MiB", n / MIB)
    } else {
        format!("{:.1} KiB", n / 1024.0)
    }
}

/// `8.03 B`, `134.5 M`.
pub fn count(n: u64) -> String {
    let n = n as f64;
    if n >= 1e9 {
        format!("{:.2} B", n / 1e9)
    } else if n >= 1e6 {
        format!("{:.1} M", n / 1e6)
    } else {
        format!("{:.1} K", n / 1e3)
    }
}

/// `1.5 s`, `12.3 ms`, or hours and minutes.
pub fn seconds(s: f64) -> String {
    if s >= 3600.0 {
        format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), (s % 3600.0) / 60.0)
    } else if s >= 60.0 {
        format!("{:.0} min {:02.0} s", (s / 60.0).floor(), s % 60.0)
    } else if s >= 1.0 {
        format!("{s:.2} s")
    } else if s >= 1e-3 {
        format!("{:.1} ms", s * 1e3)
    } else {
        format!("{:.1} us", s * 1e6)
    }
}

/// Three significant digits of a number that may be small: `0.000612`.
pub fn small(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        return format!("{x:.2}");
    }
    let digits = (2.0 - x.abs().log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{x:.digits$}")
}

/// Bytes from `80GiB`, `24 GB`, `512MiB` or a plain number from a million on.
///
/// # Errors
/// What was wrong with the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| {
        format!("`{text}` is not a size: write bytes, or a number with KiB, MiB, GiB, MB or GB")
    })?;
    let factor = match unit.trim().to_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => MIB,
        "g" | "gib" => GIB,
        "t" | "tib" => GIB * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        other => {
            return Err(format!("`{other}` is no unit of memory: use KiB, MiB, GiB, MB or GB"));
        }
    };
    let bytes = number * factor;
    // Nobody means so few: gigabytes, more likely.
    if unit.trim().is_empty() && (1.0..MIB).contains(&bytes) {
        return Err(format!("`{text}` is {number} bytes: give a unit, such as {text}GiB"));
    }
    if bytes >= 1.0 && bytes < 2f64.powi(62) {
        Ok(bytes as u64)
    } else {
        Err(format!("`{text}` is out of range: give at least 1 byte and less than 2^62"))
    }
}

/// Most of anything that is counted.
const MOST: usize = 1_000_000_000;

/// A number of steps, tokens or rows: 1 to a billion.
///
/// # Errors
/// It is no such number.
pub fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(count) if (1..=MOST).contains(&count) => Ok(count),
        _ => Err(format!("give a whole number from 1 to {MOST}")),
    }
}

/// As [`parse_count`], or 0.
///
/// # Errors
/// It is no such number.
pub fn parse_count_or_none(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(count) if count <= MOST => Ok(count),
        _ => Err(format!("give a whole number from 0 to {MOST}")),
    }
}

/// US dollars an hour.
///
/// # Errors
/// It is no price.
pub fn parse_price(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(usd) if usd.is_finite() && (0.0..=1e6).contains(&usd) => Ok(usd),
        _ => Err(format!("`{text}` is no price: give US dollars an hour, such as 2.49")),
    }
}

/// GB a second.
///
/// # Errors
/// It is no rate.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && (0.001..=1e5).contains(&rate) => Ok(rate),
        _ => Err(format!("`{text}` is no rate: give GB/s, such as 50")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_keep_three_digits() {
        assert_eq!(small(0.000_612_34), "0.000612");
        assert_eq!(small(1.5), "1.50");
        assert_eq!(small(0.0), "0.00");
        assert_eq!(small(1234.5), "1234");
    }

    #[test]
    fn sizes_with_units() {
        assert_eq!(parse_bytes("80GiB"), Ok(80 << 30));
        assert_eq!(parse_bytes("24 GB"), Ok(24_000_000_000));
        assert_eq!(parse_bytes("1.5m"), Ok(3 << 19));
        assert_eq!(parse_bytes("12345678"), Ok(12_345_678));
        assert!(parse_bytes("48").unwrap_err().contains("48GiB"));
        for bad in ["", "GiB", "-1", "5 parsec", "1e400", "0"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
