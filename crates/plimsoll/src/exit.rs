//! How the program ends: 0 done, 1 failed, 2 bad usage or bad input, 3 does
//! not fit.

use std::fmt;

/// Why a command stopped, in the words the user reads.
#[derive(Debug)]
pub enum Stop {
    /// The machine failed us: status 1.
    Failed(String),
    /// Something that the user gave cannot be used: status 2.
    Input(String),
    /// The plan needs more memory than there is: status 3.
    DoesNotFit(String),
}

impl Stop {
    /// Bad input, from any error that describes it.
    pub fn input(error: impl fmt::Display) -> Stop {
        Stop::Input(error.to_string())
    }

    pub fn status(&self) -> u8 {
        match self {
            Stop::Failed(_) => 1,
            Stop::Input(_) => 2,
            Stop::DoesNotFit(_) => 3,
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Failed(m) | Stop::Input(m) | Stop::DoesNotFit(m) => f.write_str(m),
        }
    }
}

impl From<plimsoll_plan::DeviceError> for Stop {
    fn from(error: plimsoll_plan::DeviceError) -> Stop {
        match error {
            plimsoll_plan::DeviceError::Reserve { .. }
            | plimsoll_plan::DeviceError::ReserveHost { .. } => Stop::DoesNotFit(error.to_string()),
            plimsoll_plan::DeviceError::Ranks { .. } => Stop::Failed(error.to_string()),
            // Not what the user gave, but another rank has failed.
            plimsoll_plan::DeviceError::Source(e) if e.is::<plimsoll_comm::CommError>() => {
                Stop::Failed(e.to_string())
            }
            plimsoll_plan::DeviceError::Source(_) => Stop::Input(error.to_string()),
        }
    }
}

/// What every command returns.
pub type Outcome = Result<(), Stop>;
