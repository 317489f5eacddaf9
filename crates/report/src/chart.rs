//! Charts over what was varied: panels that share the horizontal axis.

use crate::scale::Scale;
use crate::svg::{Shape, Svg, shorten, text_width};

const WIDTH: f64 = 760.0;
const RIGHT: f64 = 26.0;

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
    pub limits: Vec<(f64, String)>,
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
            values.extend(panel.shown_limits().map(|limit| limit.0));
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
                draw_line(&mut svg, line, &x, y);
            }
        }
        // Above all drawing, so that every point can be reached.
        for (panel, y) in &placed {
            for line in &panel.lines {
                for mark in line.points.iter().filter(|mark| !mark.hint.is_empty()) {
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
    fn shown_limits(&self) -> impl Iterator<Item = &(f64, String)> {
        let values = self.lines.iter().flat_map(|l| &l.points).map(|m| m.y);
        let largest = values.fold(0.0, f64::max);
        self.limits.iter().filter(move |limit| limit.0 <= largest * 2.0)
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
    for (value, label) in panel.shown_limits() {
        let at = y.pixel(*value);
        svg.line("limit", (x.from, at), (x.to, at));
        svg.text(x.from + 8.0, at - 6.0, "limit-text", "start", label);
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
        if let Some(shape) = line.shape {
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
