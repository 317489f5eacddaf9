//! From measured rows to something to look at: fits, conclusions in words,
//! charts and one self-contained page.
//!
//! Input is what a sweep leaves behind (`points.jsonl`), CSV of others, and, for
//! the memory of a step over time, the live bytes after each op. The page needs no network,
//! its charts are inline SVG, and it follows the reader's light or dark theme.

mod chart;
mod charts;
mod conclude;
mod csv_rows;
mod fit;
mod format;
mod page;
mod png;
mod render;
mod scale;
mod series;
mod study;
mod svg;
mod table;
mod timeline;

pub use fit::{Fit, Kink};
pub use png::{Theme, png};
pub use render::{Options, Report, ReportError, render};
pub use series::{Row, Series, Status};
pub use timeline::{Level, Timeline, TimelineOp, TimelineTensor};
