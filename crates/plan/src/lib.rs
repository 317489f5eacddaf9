//! From a program to addresses and seconds: lifetimes, the layout of the slab,
//! the simulated lanes, and the ledger that says where the bytes are.

mod catalogue;
mod device;
mod layout;
mod ledger;
mod lifetime;
mod schedule;

pub use catalogue::{DeviceProfile, cpu_profile, gpu, gpu_names};
pub use device::{Device, DeviceError, LaunchTime, Taken};
pub use layout::{ALIGNMENT, Layout, LayoutError, Placement, lay_out, lay_out_together};
pub use ledger::{Live, PlanReport, live_bytes, plan_report};
pub use lifetime::{Lifetime, lifetimes};
pub use schedule::{OpTime, Schedule, schedule};
