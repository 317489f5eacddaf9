//! Numbers as people read them.

/// A unit that a whole column or axis is written in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit {
    pub name: &'static str,
    /// How many of the base unit (byte, second) it is.
    pub size: f64,
}

const BYTES: [Unit; 5] = [
    Unit { name: "bytes", size: 1.0 },
    Unit { name: "KiB", size: 1024.0 },
    Unit { name: "MiB", size: 1024.0 * 1024.0 },
    Unit { name: "GiB", size: 1024.0 * 1024.0 * 1024.0 },
    Unit { name: "TiB", size: 1024.0 * 1024.0 * 1024.0 * 1024.0 },
];

const SECONDS: [Unit; 3] = [
    Unit { name: "us", size: 1e-6 },
    Unit { name: "ms", size: 1e-3 },
    Unit { name: "s", size: 1.0 },
];

/// The largest unit of which `largest` holds at least one.
pub fn byte_unit(largest: f64) -> Unit {
    largest_below(&BYTES, largest)
}

/// As [`byte_unit`], for seconds.
pub fn second_unit(largest: f64) -> Unit {
    largest_below(&SECONDS, largest)
}

fn largest_below(units: &[Unit], value: f64) -> Unit {
    let fits = |unit: &&Unit| unit.size <= value.abs();
    *units.iter().rev().find(fits).unwrap_or(&units[0])
}

/// `1.234 GiB`.
pub fn bytes(value: f64) -> String {
    let unit = byte_unit(value);
    format!("{} {}", digits(value / unit.size), unit.name)
}

const DURATIONS: [Unit; 4] = [
    Unit { name: "s", size: 1.0 },
    Unit { name: "minutes", size: 60.0 },
    Unit { name: "hours", size: 3600.0 },
    Unit { name: "days", size: 86400.0 },
];

/// The unit for the time of a whole run: minutes up to three hours.
pub fn duration_unit(longest: f64) -> Unit {
    largest_below(&DURATIONS, longest / 3.0)
}

/// `28.8 minutes`.
pub fn duration(value: f64) -> String {
    let unit = duration_unit(value);
    format!("{:.1} {}", value / unit.size, unit.name)
}

/// `6.86 USD`.
pub fn usd(value: f64) -> String {
    format!("{} USD", group(&format!("{value:.2}")))
}

/// A whole number with its thousands grouped.
pub fn count(value: f64) -> String {
    group(&format!("{value:.0}"))
}

/// `12.34 ms`.
pub fn seconds(value: f64) -> String {
    let unit = second_unit(value);
    format!("{} {}", digits(value / unit.size), unit.name)
}

/// Four significant digits, thousands grouped: `0.01234`, `12.34`, `12,345`.
pub fn digits(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !value.is_finite() {
        return value.to_string();
    }
    let magnitude = value.abs().log10().floor();
    if !(-6.0..15.0).contains(&magnitude) {
        return format!("{value:.3e}");
    }
    let decimals = (3.0 - magnitude).clamp(0.0, 9.0) as usize;
    group(&format!("{value:.decimals$}"))
}

/// `+1.23`, `-0.04`; always two decimals.
pub fn percent(value: f64) -> String {
    let text = format!("{value:+.2}");
    match text.as_str() {
        "-0.00" | "+0.00" => "0.00".to_owned(),
        _ => text,
    }
}

/// Puts commas between the thousands before the decimal point.
fn group(text: &str) -> String {
    let (sign, text) = match text.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut out = sign.to_owned();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    if !fraction.is_empty() {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// Decimals that tell multiples of `step` apart.
pub fn decimals_of(step: f64) -> usize {
    (0..9)
        .find(|&d| {
            let scaled = step * 10f64.powi(d);
            (scaled - scaled.round()).abs() < 1e-6 * scaled.abs().max(1.0)
        })
        .unwrap_or(9) as usize
}

/// A tick label.
pub fn tick(value: f64, decimals: usize) -> String {
    let text = group(&format!("{value:.decimals$}"));
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|c| matches!(c, '0' | '.')) => rest.to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(digits(12345.6), "12,346");
        assert_eq!(digits(1234.5), "1,234");
        assert_eq!(digits(12.345), "12.35");
        assert_eq!(digits(0.012345), "0.01235");
        assert_eq!(digits(-1234567.0), "-1,234,567");
        assert_eq!(digits(0.0), "0");
        assert_eq!(digits(1e-9), "1.000e-9");
        assert_eq!(digits(1e20), "1.000e20");
        assert_eq!(digits(f64::NAN), "NaN");
        assert_eq!(percent(-0.001), "0.00");
        assert_eq!(percent(1.5), "+1.50");
        assert_eq!(tick(-0.0, 1), "0.0");
        assert_eq!(tick(2048.0, 0), "2,048");
        assert_eq!([decimals_of(0.25), decimals_of(20.0), decimals_of(0.1)], [2, 0, 1]);
    }

    #[test]
    fn units() {
        assert_eq!(bytes(1536.0), "1.500 KiB");
        assert_eq!(bytes(3.5 * 1024f64.powi(3)), "3.500 GiB");
        assert_eq!(bytes(0.0), "0 bytes");
        assert_eq!(seconds(0.0123), "12.30 ms");
        assert_eq!(seconds(75.0), "75.00 s");
        assert_eq!(byte_unit(1e99).name, "TiB");
    }
}
