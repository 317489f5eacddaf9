//! The ops of a section on the lanes of the device: one stream each, and an event
//! wherever one lane waits for another.

use std::cell::OnceCell;
use std::ops::Range;

use cudarc::driver::sys;
use plimsoll_plan::Waits;
use plimsoll_program::Lane;

use crate::driver::{Context, Event, stream};
use crate::error::CudaError;
use crate::launch::Launcher;

/// The stream of each lane; those beside the context's own are made when a program
/// first wants them.
#[derive(Default)]
pub(crate) struct Streams {
    others: [OnceCell<Stream>; Lane::ALL.len()],
}

/// A stream of the context that was current when it was made.
pub(crate) struct Stream(pub sys::CUstream);

impl Stream {
    pub fn new() -> Result<Stream, CudaError> {
        Ok(Stream(stream()?))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        crate::driver::destroy(self.0);
    }
}

impl Streams {
    /// The streams of all lanes that a section uses; the compute lane's for the rest.
    pub fn of(
        &self,
        context: &Context,
        used: impl Fn(Lane) -> bool,
    ) -> Result<[sys::CUstream; Lane::ALL.len()], CudaError> {
        let mut streams = [context.stream; Lane::ALL.len()];
        for lane in Lane::ALL.into_iter().filter(|lane| *lane != Lane::Compute && used(*lane)) {
            let cell = &self.others[lane.index()];
            if cell.get().is_none() {
                let _ = cell.set(Stream::new()?);
            }
            if let Some(stream) = cell.get() {
                streams[lane.index()] = stream.0;
            }
        }
        Ok(streams)
    }
}

/// Puts the ops of a section on their lanes' streams. All of them start where the
/// compute lane's stream stands, and it goes on when all have ended: that is what a
/// capture wants as well.
///
/// Returns its events: they must outlive a capture.
pub(crate) fn run_section(
    launcher: &Launcher,
    waits: &Waits,
    ops: Range<usize>,
) -> Result<Vec<Event>, CudaError> {
    let program = launcher.program;
    let compute = launcher.lanes[Lane::Compute.index()];
    let others = || launcher.lanes.iter().filter(|stream| **stream != compute);
    let mut ends = Vec::new();
    if others().next().is_some() {
        let start = launcher.context.mark()?;
        start.record(compute)?;
        others().try_for_each(|stream| start.hold(*stream))?;
        ends.push(start);
    }
    let awaited = waits.awaited();
    // By op; one launch has one event.
    let mut events: Vec<(usize, Event)> = Vec::new();
    let mut at = ops.start;
    while at < ops.end {
        let stream = launcher.lanes[program.lane(&program.ops[at].kind).index()];
        for op in waits.of(at) {
            let found = events.binary_search_by_key(op, |(at, _)| *at);
            // A launch of several ops has its event at the last of them.
            let index = found.unwrap_or_else(|next| next);
            events[index].1.hold(stream)?;
        }
        let next = launcher.run(at, waits.launch_end(program, at, ops.end))?;
        if (at..next).any(|op| awaited[op]) {
            let event = launcher.context.mark()?;
            event.record(stream)?;
            events.push((next - 1, event));
        }
        at = next;
    }
    for stream in others() {
        let end = launcher.context.mark()?;
        end.record(*stream)?;
        end.hold(compute)?;
        ends.push(end);
    }
    ends.extend(events.into_iter().map(|(_, event)| event));
    Ok(ends)
}
