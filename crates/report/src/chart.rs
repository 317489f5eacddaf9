//! Charts over what was varied: panels that share the horizontal axis.

use crate::scale::Scale;
use crate::svg::{Shape, Svg, shorten, text_width};

const WIDTH: f64 = 760.0;
const RIGHT: f64 = 26.0;
/// Lines of more points have no markers.
const MOST_MARKERS: usize = 60;
const MOST_HINTS: usize = 400;

pub struct Chart {
    pub title: String,
    pub x_title: String,
    /// Everything that was varied, so that charts of one page line up.
    pub xs: Vec<f64>,
    pub panels: Vec<Panel>,
}

pub struct Panel {
    pub y_title: String,
    /// How much one unit of the labels is: 2^30 for GiB.
    pub unit: f64,
    pub height: f64,
    pub lines: Vec<Line>,
    /// Horizontal lines with a label.
    pub limits: Vec<Limit>,
    /// Words at points: where, what, and in which colour.
    pub words: Vec<(f64, f64, String, usize)>,
}

/// A horizontal line.
pub struct Limit {
    pub value: f64,
    pub label: String,
    pub kind: LimitKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// Not to be exceeded; far above everything it is not shown.
    Ceiling,
    /// The best of all.
    Best,
}

/// One quantity of one series.
pub struct Line {
    /// For the legend; empty stays out of it.
    pub label: String,
    pub colour: usize,
    pub shape: Option<Shape>,
    pub draw: Draw,
    /// Pixels to the side, where several would cover each other.
    pub aside: f64,
    pub points: Vec<Mark>,
    /// The area around the line, `(x, low, high)`.
    pub band: Vec<(f64, f64, f64)>,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            label: String::new(),
            colour: 0,
            shape: None,
            draw: Draw::Solid,
            aside: 0.0,
            points: Vec::new(),
            band: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Draw {
    Solid,
    Dashed,
    Dotted,
    /// From zero to the point: for differences.
    Stems,
    /// Markers alone.
    Marks,
}

/// A point and what it says under the pointer.
pub struct Mark {
    pub x: f64,
    pub y: f64,
    pub hint: String,
}

impl Chart {
    /// The drawing, or `None` if there is not a single point.
    pub fn draw(&self) -> Option<String> {
        let panels: Vec<&Panel> = self
            .panels
            .iter()
            .filter(|panel| panel.lines.iter().any(|line| !line.points.is_empty()))
            .collect();
        if panels.is_empty() {
            return None;
        }

        let mut svg = Svg::new(WIDTH);
        svg.text(14.0, 24.0, "title", "start", &self.title);
        let top = legend(&mut svg, &panels, 44.0);

        // The labels of all panels end at the same place, so measure first.
        let mut y = top + 12.0;
        let mut placed = Vec::new();
        for panel in &panels {
            let values = panel.lines.iter().flat_map(|l| &l.points).map(|m| m.y);
            let mut values: Vec<f64> = values.collect();
            values.extend(panel.lines.iter().flat_map(|l| &l.band).map(|band| band.2));
            values.extend(panel.shown_limits().map(|limit| limit.value));
            let ticks = (panel.height / 45.0).max(2.0) as usize;
            let scale = Scale::linear(&values, panel.unit, ticks, y + panel.height, y);
            placed.push((*panel, scale));
            y += panel.height + 26.0;
        }
        let bottom = y - 26.0;
        let widest = placed
            .iter()
            .flat_map(|(_, scale)| &scale.ticks)
            .map(|tick| text_width(&tick.1))
            .fold(20.0, f64::max);
        let left = 34.0 + widest + 8.0;
        let x = Scale::varied(&self.xs, left, WIDTH - RIGHT);

        for (panel, y) in &placed {
            frame(&mut svg, panel, &x, y);
            for line in &panel.lines {
                let pixels =
                    |&(at, low, high): &(f64, f64, f64)| (x.pixel(at), y.pixel(high), y.pixel(low));
                svg.band(&line.band.iter().map(pixels).collect::<Vec<_>>(), line.colour);
            }
            for line in &panel.lines {
                draw_line(&mut svg, line, &x, y);
            }
            label(&mut svg, panel, &x, y);
        }
        // Above all drawing, so that every point can be reached.
        for (panel, y) in &placed {
            for line in &panel.lines {
                // Of thousands only some: they would cover each other anyway.
                let every = line.points.len().div_ceil(MOST_HINTS).max(1);
                let marks = line.points.iter().step_by(every);
                for mark in marks.filter(|mark| !mark.hint.is_empty()) {
                    let at = (x.pixel(mark.x) + line.aside, y.pixel(mark.y));
                    svg.hint(at, &mark.hint);
                }
            }
        }
        for (value, label) in &x.ticks {
            let at = x.pixel(*value);
            svg.line("frame", (at, bottom), (at, bottom + 5.0));
            svg.text(at, bottom + 19.0, "tick", "middle", label);
        }
        let middle = (x.from + x.to) / 2.0;
        svg.text(middle, bottom + 40.0, "", "middle", &self.x_title);
        Some(svg.finish(bottom + 54.0, &self.title))
    }
}

impl Panel {
    /// A limit far above everything would press the points to the floor.
    fn shown_limits(&self) -> impl Iterator<Item = &Limit> {
        let values = self.lines.iter().flat_map(|l| &l.points).map(|m| m.y);
        let largest = values.fold(0.0, f64::max);
        self.limits.iter().filter(move |limit| limit.value <= largest * 2.0)
    }
}

/// Rows of swatch and name; returns where they end.
fn legend(svg: &mut Svg, panels: &[&Panel], top: f64) -> f64 {
    let (mut x, mut y) = (14.0, top);
    let mut seen: Vec<&str> = Vec::new();
    for line in panels.iter().flat_map(|panel| &panel.lines) {
        if line.label.is_empty() || line.points.is_empty() || seen.contains(&line.label.as_str()) {
            continue;
        }
        seen.push(&line.label);
        let label = shorten(&line.label, WIDTH - 90.0);
        let width = 36.0 + text_width(&label) + 20.0;
        if x > 14.0 && x + width > WIDTH {
            (x, y) = (14.0, y + 20.0);
        }
        if let Some(dash) = line.draw.dash() {
            svg.path(&[(x, y), (x + 28.0, y)], line.colour, dash);
        }
        if let Some(shape) = line.shape {
            svg.marker(shape, (x + 14.0, y), line.colour);
        }
        svg.text(x + 36.0, y + 4.0, "", "start", &label);
        x += width;
    }
    y + 10.0
}

fn frame(svg: &mut Svg, panel: &Panel, x: &Scale, y: &Scale) {
    for (value, label) in &y.ticks {
        let at = y.pixel(*value);
        let class = if *value == 0.0 { "frame" } else { "grid" };
        svg.line(class, (x.from, at), (x.to, at));
        svg.text(x.from - 8.0, at + 4.0, "tick", "end", label);
    }
    svg.text_up(18.0, (y.from + y.to) / 2.0, &panel.y_title);
    for limit in panel.shown_limits() {
        let at = y.pixel(limit.value);
        svg.line(limit.class(), (x.from, at), (x.to, at));
    }
}

impl Limit {
    fn class(&self) -> &'static str {
        match self.kind {
            LimitKind::Ceiling => "limit",
            LimitKind::Best => "best",
        }
    }
}

/// Words over the drawing: at limits where the least of it is covered.
fn label(svg: &mut Svg, panel: &Panel, x: &Scale, y: &Scale) {
    let drawn: Vec<(f64, f64)> = panel
        .lines
        .iter()
        .flat_map(|line| &line.points)
        .map(|mark| (x.pixel(mark.x), y.pixel(mark.y)))
        .collect();
    for limit in panel.shown_limits() {
        let at = y.pixel(limit.value);
        let text = shorten(&limit.label, x.to - x.from - 16.0);
        let width = text_width(&text);
        let top = y.from.min(y.to);
        let places = [
            (x.from + 8.0, at - 6.0),
            (x.to - 8.0 - width, at - 6.0),
            (x.from + 8.0, at + 15.0),
            (x.to - 8.0 - width, at + 15.0),
        ];
        // How near the nearest point is, in pixels.
        let room = |(left, base): (f64, f64)| -> f64 {
            if base - 11.0 < top - 20.0 || base > y.from.max(y.to) {
                return 0.0;
            }
            let near = |(px, py): &(f64, f64)| {
                let dx = (left - px).max(px - left - width).max(0.0);
                let dy = (base - 10.0 - py).max(py - base).max(0.0);
                dx.hypot(dy)
            };
            drawn.iter().map(near).fold(60.0, f64::min)
        };
        let best = places.into_iter().reduce(|a, b| if room(b) > room(a) { b } else { a });
        let (left, base) = best.unwrap_or((x.from + 8.0, at - 6.0));
        svg.text(left, base, &format!("{}-text", limit.class()), "start", &text);
    }
    for (px, py, text, colour) in &panel.words {
        let (px, py) = (x.pixel(*px), y.pixel(*py));
        let width = text_width(text);
        // Left of the point and above it, if there is room.
        let (at, anchor) = match px - 12.0 - width < x.from {
            true => ((px + 10.0).min(x.to - width), "start"),
            false => (px - 10.0, "end"),
        };
        let base = (py - 9.0).max(y.from.min(y.to) + 11.0);
        svg.text_in(at, base, *colour, anchor, text);
    }
}

fn draw_line(svg: &mut Svg, line: &Line, x: &Scale, y: &Scale) {
    let at: Vec<(f64, f64)> =
        line.points.iter().map(|mark| (x.pixel(mark.x) + line.aside, y.pixel(mark.y))).collect();
    if let Some(dash) = line.draw.dash() {
        svg.path(&at, line.colour, dash);
    }
    for &point in &at {
        if line.draw == Draw::Stems {
            svg.path(&[(point.0, y.pixel(0.0)), point], line.colour, "");
        }
        if let Some(shape) = line.shape.filter(|_| line.points.len() <= MOST_MARKERS) {
            svg.marker(shape, point, line.colour);
        }
    }
}

impl Draw {
    /// `None` for what is not joined up.
    fn dash(self) -> Option<&'static str> {
        match self {
            Self::Solid => Some(""),
            Self::Dashed => Some("7 4"),
            Self::Dotted => Some("1.5 4"),
            Self::Stems | Self::Marks => None,
        }
    }
}
