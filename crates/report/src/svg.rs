//! A small writer of SVG. Colours are CSS variables, so that one drawing
//! serves the light and the dark theme.

use std::fmt::Write;
use std::sync::LazyLock;

/// Colours for series and classes: eight, told apart by people with the common
/// colour vision deficiencies, at 3:1 or better on their background.
pub const COLOURS: usize = 8;

/// Names and values of the colours, light and dark.
const THEME: [(&str, &str, &str); 14] = [
    ("bg", "#ffffff", "#14171a"),
    ("fg", "#1c2126", "#e6e9ec"),
    ("muted", "#59636e", "#9ba6b1"),
    ("grid", "#e3e7eb", "#2a3036"),
    ("frame", "#aab2bb", "#56606a"),
    ("bad", "#c0182b", "#ff6b7a"),
    ("c0", "#1f6fb4", "#6cb4f0"),
    ("c1", "#c2540a", "#f29b5c"),
    ("c2", "#1a7f5a", "#5cc79a"),
    ("c3", "#8a4fb0", "#c79ae6"),
    ("c4", "#a8324a", "#ef8096"),
    ("c5", "#6f6d00", "#c9c75a"),
    ("c6", "#4c6a78", "#9ab8c6"),
    ("c7", "#7a5230", "#c9a07a"),
];

const FONT: &str =
    "font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif";

/// The classes of all drawings.
const CLASSES: &str = "\
.chart text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif;fill:var(--fg)}\
.chart .title{font-size:15px;font-weight:600}.chart .tick{fill:var(--muted)}\
.chart .grid{stroke:var(--grid)}.chart .frame{stroke:var(--frame)}.chart .back{fill:var(--bg)}\
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}.chart .bad{stroke:var(--bad);stroke-width:2.2}\
.chart .cross{stroke-width:2.2}.chart .band{fill-opacity:.22}\
.chart .limit{stroke:var(--bad);stroke-width:1.4;stroke-dasharray:2 3}.chart .limit-text{fill:var(--bad)}\
.chart .best{stroke:var(--fg);stroke-width:1.4;stroke-dasharray:6 3}\
.chart .limit-text,.chart .best-text,.chart .mark{paint-order:stroke;stroke:var(--bg);stroke-width:3px;stroke-linejoin:round}\
.chart .hit{fill:transparent}.chart .hit:hover{fill:var(--muted);fill-opacity:.25}";

/// Theme and classes of all drawings; also part of the page's style.
pub static STYLE: LazyLock<String> = LazyLock::new(|| {
    let all = |colour: fn(&(&str, &'static str, &'static str)) -> &'static str| -> String {
        let line = |entry| format!("--{}:{};", theme_name(entry), colour(entry));
        THEME.iter().map(line).collect()
    };
    format!(
        ":root{{{}}}@media(prefers-color-scheme:dark){{:root{{{}}}}}{CLASSES}",
        all(|entry| entry.1),
        all(|entry| entry.2)
    )
});

fn theme_name(entry: &(&'static str, &str, &str)) -> &'static str {
    entry.0
}

/// The style for one theme without variables, and the value of each variable:
/// for painters that know neither.
pub fn static_style(dark: bool) -> (String, Vec<(&'static str, &'static str)>) {
    let colours = THEME.map(|(name, light, darker)| (name, if dark { darker } else { light }));
    let style = CLASSES.replace(FONT, "font-family:sans-serif;font-size:12px");
    (style.replace("fill:transparent", "fill:none"), colours.to_vec())
}

/// The body of a drawing.
pub struct Svg {
    pub body: String,
    width: f64,
}

impl Svg {
    pub fn new(width: f64) -> Self {
        Self { body: String::new(), width }
    }

    /// Closes the drawing. `inline` leaves out what the page already has.
    pub fn finish(self, height: f64, title: &str) -> String {
        let width = self.width;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{label}\">\n\
             <style>{style}</style>\n\
             <rect class=\"back\" width=\"{width}\" height=\"{height}\"/>\n{body}</svg>\n",
            style = *STYLE,
            label = escape(title),
            body = self.body
        )
    }

    pub fn text(&mut self, x: f64, y: f64, class: &str, anchor: &str, text: &str) {
        let _ = writeln!(
            self.body,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
            escape(text)
        );
    }

    /// A word at a point, in a colour, that can be read over lines.
    pub fn text_in(&mut self, x: f64, y: f64, colour: usize, anchor: &str, text: &str) {
        let _ = writeln!(
            self.body,
            "<text class=\"mark\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" style=\"fill:{}\">{}</text>",
            variable(colour),
            escape(text)
        );
    }

    /// Text that reads upwards, its middle at the point.
    pub fn text_up(&mut self, x: f64, y: f64, text: &str) {
        let _ = writeln!(
            self.body,
            "<text transform=\"translate({x:.1} {y:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escape(text)
        );
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let _ = writeln!(
            self.body,
            "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    /// A polyline in colour `colour`; `dash` as in `stroke-dasharray`.
    pub fn path(&mut self, points: &[(f64, f64)], colour: usize, dash: &str) {
        if points.len() < 2 {
            return;
        }
        let mut d = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let _ = write!(d, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
        }
        let dash = match dash {
            "" => String::new(),
            dash => format!(" stroke-dasharray=\"{dash}\""),
        };
        let _ = writeln!(
            self.body,
            "<path class=\"line\" d=\"{d}\" stroke=\"{}\"{dash}/>",
            variable(colour)
        );
    }

    /// The area between two lines over the same points, `(x, upper, lower)`.
    pub fn band(&mut self, points: &[(f64, f64, f64)], colour: usize) {
        if points.len() < 2 {
            return;
        }
        let mut d = String::new();
        let upper = points.iter().map(|p| (p.0, p.1));
        let lower = points.iter().rev().map(|p| (p.0, p.2));
        for (index, (x, y)) in upper.chain(lower).enumerate() {
            let _ = write!(d, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
        }
        let _ =
            writeln!(self.body, "<path class=\"band\" d=\"{d}Z\" fill=\"{}\"/>", variable(colour));
    }

    /// A point. Each shape belongs to a quantity, so that colour is never the
    /// only difference.
    pub fn marker(&mut self, shape: Shape, (x, y): (f64, f64), colour: usize) {
        let ink = variable(colour);
        let _ = match shape {
            Shape::Dot => writeln!(
                self.body,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.4\" fill=\"{ink}\"/>"
            ),
            Shape::Ring => writeln!(
                self.body,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5.2\" fill=\"none\" stroke=\"{ink}\" stroke-width=\"1.8\"/>"
            ),
            Shape::Square => writeln!(
                self.body,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"6.4\" height=\"6.4\" fill=\"{ink}\"/>",
                x - 3.2,
                y - 3.2
            ),
            Shape::Diamond => writeln!(
                self.body,
                "<path d=\"M{:.1} {y:.1}L{x:.1} {:.1}L{:.1} {y:.1}L{x:.1} {:.1}Z\" fill=\"{ink}\"/>",
                x - 4.6,
                y - 4.6,
                x + 4.6,
                y + 4.6
            ),
            Shape::Cross => writeln!(
                self.body,
                "<path class=\"cross\" stroke=\"{ink}\" d=\"M{0:.1} {2:.1}L{1:.1} {3:.1}M{0:.1} {3:.1}L{1:.1} {2:.1}\"/>",
                x - 5.0,
                x + 5.0,
                y - 5.0,
                y + 5.0
            ),
        };
    }

    /// An invisible spot that shows `text` under the pointer.
    pub fn hint(&mut self, (x, y): (f64, f64), text: &str) {
        let _ = writeln!(
            self.body,
            "<circle class=\"hit\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"9\"><title>{}</title></circle>",
            escape(text)
        );
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Dot,
    Ring,
    Square,
    Diamond,
    Cross,
}

/// The colour of what went wrong.
pub const BAD: usize = usize::MAX;

pub fn variable(colour: usize) -> String {
    match colour {
        BAD => "var(--bad)".to_owned(),
        _ => format!("var(--c{})", colour % COLOURS),
    }
}

/// Roughly how wide a line of 12 pixel text is.
pub fn text_width(text: &str) -> f64 {
    text.chars()
        .map(|c| match c {
            'i' | 'j' | 'l' | '.' | ',' | ':' | '\'' | '|' | ' ' => 3.6,
            'm' | 'w' | 'M' | 'W' | '%' | '@' => 10.5,
            'A'..='Z' => 8.4,
            _ => 6.9,
        })
        .sum()
}

/// Cuts text to a width, with dots where something is missing.
pub fn shorten(text: &str, width: f64) -> String {
    if text_width(text) <= width {
        return text.to_owned();
    }
    let mut out = String::new();
    for c in text.chars() {
        out.push(c);
        if text_width(&out) + 11.0 > width {
            out.pop();
            break;
        }
    }
    out + "..."
}

/// Makes text safe inside XML and HTML, attributes included.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML has no way to write most control characters.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_cut() {
        assert_eq!(escape("<a b=\"'&\u{1}"), "&lt;a b=&quot;&#39;&amp;\u{fffd}");
        assert_eq!(shorten("short", 100.0), "short");
        let cut = shorten(&"layers.0.mlp.down.".repeat(9), 100.0);
        assert!(cut.ends_with("...") && text_width(&cut) <= 104.0, "{cut}");
    }
}
