//! How much memory the machine grants to this process: what is built in, less
//! what control groups (a container, a batch system) keep from it.

use std::path::{Path, PathBuf};

use crate::resident::{ResidentError, kib_field};

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineMemory {
    /// What this process and its neighbours in the control group may use at
    /// most: the machine's memory or the tightest limit above the process.
    pub total: u64,
    /// What could be taken now without swapping.
    pub available: u64,
    /// `total` comes from a control group, not from the machine.
    pub limited_by_cgroup: bool,
}

/// Asks the kernel (`/proc/meminfo`; control groups version 1 and 2).
pub fn machine_memory() -> Result<MachineMemory, ResidentError> {
    if !cfg!(target_os = "linux") {
        return Err(ResidentError::Unsupported);
    }
    read(Path::new("/"))
}

/// [`MachineMemory::total`]: no process here can ever hold more.
pub fn machine_memory_limit() -> Result<u64, ResidentError> {
    Ok(machine_memory()?.total)
}

/// How many processes of this control group the kernel has ended for want of
/// memory so far; `None` where it does not say.
pub(crate) fn oom_kills() -> Option<u64> {
    oom_kills_under(Path::new("/"))
}

fn read(root: &Path) -> Result<MachineMemory, ResidentError> {
    let path = root.join("proc/meminfo");
    let text = std::fs::read_to_string(&path).map_err(|source| ResidentError::Io {
        action: "read",
        path: path.display().to_string(),
        source,
    })?;
    let missing = |field| ResidentError::Missing { path: path.display().to_string(), field };
    let total = kib_field(&text, "MemTotal").ok_or_else(|| missing("MemTotal"))?;
    let free = kib_field(&text, "MemAvailable").or_else(|| kib_field(&text, "MemFree"));
    let mut memory =
        MachineMemory { total, available: free.unwrap_or(total), limited_by_cgroup: false };
    for group in groups(root) {
        // A limit anywhere between the process and the root counts.
        for folder in group.folders() {
            let (limit, used, cache) = match group.version {
                1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
                _ => ("memory.max", "memory.current", "inactive_file"),
            };
            let Some(limit) = number(&folder.join(limit)) else {
                continue;
            };
            if limit < memory.total {
                memory.total = limit;
                memory.limited_by_cgroup = true;
            }
            if limit < total
                && let Some(used) = number(&folder.join(used))
            {
                // Page cache that nobody uses gives way.
                let cache = keyed(&folder.join("memory.stat"), cache).unwrap_or(0);
                let left = limit.saturating_sub(used.saturating_sub(cache));
                memory.available = memory.available.min(left);
            }
        }
    }
    memory.available = memory.available.min(memory.total);
    Ok(memory)
}

fn oom_kills_under(root: &Path) -> Option<u64> {
    groups(root)
        .iter()
        .filter_map(|group| {
            let file = match group.version {
                1 => "memory.oom_control",
                _ => "memory.events",
            };
            keyed(&group.leaf.join(file), "oom_kill")
        })
        .reduce(|a, b| a + b)
}

/// The memory controller's view of this process.
struct Group {
    version: u8,
    mount: PathBuf,
    /// Folder of this process's own group, at or below `mount`.
    leaf: PathBuf,
}

impl Group {
    fn folders(&self) -> impl Iterator<Item = &Path> {
        self.leaf.ancestors().take_while(|folder| folder.starts_with(&self.mount))
    }
}

/// Finds the groups of this process in which memory is counted. A hybrid
/// system has both versions mounted; only one of them has the files.
fn groups(root: &Path) -> Vec<Group> {
    let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let (mounts, own) = (text("proc/self/mountinfo"), text("proc/self/cgroup"));
    let mut groups = Vec::new();
    for line in mounts.lines() {
        // ID PARENT MAJOR:MINOR ROOT MOUNT OPTIONS ... - TYPE SOURCE SUPER, proc(5)
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let mut left = left.split(' ').skip(3);
        let (Some(top), Some(mount)) = (left.next(), left.next()) else {
            continue;
        };
        let mut right = right.split(' ');
        let version = match (right.next(), right.nth(1)) {
            (Some("cgroup2"), _) => 2,
            (Some("cgroup"), Some(options)) if options.split(',').any(|o| o == "memory") => 1,
            _ => continue,
        };
        // ID:CONTROLLERS:PATH, the controllers empty in version 2, cgroups(7)
        let path = own.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let ours = match version {
                1 => controllers.split(',').any(|c| c == "memory"),
                _ => controllers.is_empty(),
            };
            ours.then_some(path)
        });
        let mount = root.join(unescape(mount).trim_start_matches('/'));
        // A container often sees its own group mounted as the top, while the
        // path is that of the host, or `/..` where namespaces differ.
        let below = path
            .and_then(|path| Path::new(path).strip_prefix(unescape(top)).ok())
            .filter(|below| !below.starts_with(".."))
            .map(|below| mount.join(below))
            .filter(|leaf| leaf.is_dir());
        groups.push(Group { version, leaf: below.unwrap_or_else(|| mount.clone()), mount });
    }
    groups
}

/// Undoes the octal escapes of mountinfo for the characters that occur.
fn unescape(path: &str) -> String {
    path.replace("\\040", " ").replace("\\134", "\\")
}

/// A file that holds one number; `max`, "no limit", is none.
fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The value of `KEY VALUE` in a file of such lines.
fn keyed(path: &Path, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        (name == key).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A made-up root with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 12582912 kB\n";
        for (path, text) in files.iter().chain(&[("proc/meminfo", meminfo)]) {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn without_groups_it_is_the_machine() {
        let memory = read(root(&[]).path()).unwrap();
        assert_eq!(
            memory,
            MachineMemory { total: 16 * GIB, available: 12 * GIB, limited_by_cgroup: false }
        );
        assert_eq!(oom_kills_under(root(&[]).path()), None);
    }

    #[test]
    fn version_2_takes_the_tightest_limit_on_the_way_up() {
        let dir = root(&[
            ("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("proc/self/cgroup", "0::/user/job\n"),
            ("sys/fs/cgroup/user/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/user/memory.current", "3221225472\n"),
            ("sys/fs/cgroup/user/memory.stat", "anon 5\ninactive_file 1073741824\n"),
            ("sys/fs/cgroup/user/job/memory.max", "max\n"),
            ("sys/fs/cgroup/user/job/memory.events", "low 0\noom 9\noom_kill 3\n"),
        ]);
        let memory = read(dir.path()).unwrap();
        assert_eq!((memory.total, memory.available), (4 * GIB, 2 * GIB));
        assert!(memory.limited_by_cgroup);
        assert_eq!(oom_kills_under(dir.path()), Some(3));
    }

    #[test]
    fn version_1_and_a_container_whose_group_is_the_top() {
        let dir = root(&[
            (
                "proc/self/mountinfo",
                "29 1 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                 31 1 0:27 /docker/abc /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n",
            ),
            ("proc/self/cgroup", "4:cpu,memory:/docker/abc\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
            (
                "sys/fs/cgroup/memory/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            ),
        ]);
        let memory = read(dir.path()).unwrap();
        assert_eq!((memory.total, memory.available), (2 * GIB, 2 * GIB));
        assert_eq!(oom_kills_under(dir.path()), Some(7));
    }

    #[test]
    fn no_limit_and_nonsense() {
        let dir = root(&[
            ("proc/self/mountinfo", "junk\n31 1 0:27 / /m rw - cgroup c rw,memory\n"),
            ("proc/self/cgroup", "nonsense\n4:memory:/../other\n"),
            ("m/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!(read(dir.path()).unwrap().total, 16 * GIB);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine() {
        let memory = machine_memory().unwrap();
        assert!(memory.total >= 64 << 20 && memory.available <= memory.total);
        assert_eq!(machine_memory_limit().unwrap(), memory.total);
    }
}
