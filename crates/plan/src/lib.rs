//! From a program to addresses and seconds: lifetimes, the layout of the slab,
//! the simulated lanes, and the ledger that says where the bytes are.
//!
//! Seconds come from a [`DeviceProfile`]: measured by `plimsoll calibrate`,
//! shipped (H200), scaled by a data sheet, or guessed.

mod catalogue;
mod cost;
mod device;
mod events;
mod guess;
mod host;
mod interpolate;
mod layout;
mod ledger;
mod lifetime;
mod peers;
mod profile;
mod quantizer;
mod schedule;
mod token;
mod transport;

pub use catalogue::{Gpu, Price, closest_gpu, gpu, gpu_names, h200_profile};
pub use cost::stream_family;
pub use device::{Device, DeviceError, LaunchTime, SlabSizes, Taken, UPLOAD_PIECE};
pub use events::Waits;
pub use guess::cpu_profile;
pub use host::Host;
pub use layout::{ALIGNMENT, Layout, LayoutError, Placement, lay_out, lay_out_together};
pub use ledger::{
    Communication, Cost, Live, PlanReport, ReportFor, Updates, live_bytes, plan_report,
    plan_reports,
};
pub use lifetime::{Lifetime, lifetimes};
pub use peers::{Peers, has_nvlink};
pub use profile::{
    Attention, Check, DeviceKind, DeviceProfile, Orientation, PROFILE_FORMAT, PerType, Products,
    ProfileError, Stream,
};
pub use quantizer::{FillPiece, Quantize, QuantizeNested, Quantizer};
pub use schedule::{OpTime, Schedule, schedule};
pub use token::{TokenProducts, TokenTimes};
pub use transport::{Staging, Transport};
