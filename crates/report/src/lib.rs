//! From measured rows to something to look at: fits, conclusions in words,
//! charts and one self-contained page.
//!
//! Input is what a sweep leaves behind (`points.jsonl`) and, for the memory of
//! a step over time, the live bytes after each op. The page needs no network,
//! its charts are inline SVG, and it follows the reader's light or dark theme.

mod chart;
mod conclude;
mod fit;
mod format;
mod page;
mod render;
mod scale;
mod series;
mod svg;
mod table;
mod timeline;

pub use fit::Fit;
pub use render::{Options, Report, ReportError, render};
pub use series::{Row, Series, Status};
pub use timeline::{Timeline, TimelineOp};
