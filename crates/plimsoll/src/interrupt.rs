//! Ctrl-C asks for an orderly end; a second one ends at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);
static INSTALLED: OnceLock<bool> = OnceLock::new();

/// The flag that Ctrl-C and SIGTERM set. The handler is installed once.
pub fn flag() -> &'static AtomicBool {
    INSTALLED.get_or_init(|| {
        ctrlc::set_handler(|| {
            if ASKED.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
            note!("\nstopping; once more to stop at once");
        })
        .is_ok()
    });
    &ASKED
}
