//! Models in the local cache of the Hugging Face hub.
//!
//! `HF_HUB_CACHE` and `HF_HOME` mean what they mean to `huggingface_hub` 1.x:
//! `$HF_HOME/hub/models--org--name/snapshots/<commit>`.

use std::path::{Path, PathBuf};

/// The snapshot of `org/name` that `main` points to, if it is on this machine.
pub fn cached(model: &str) -> Option<PathBuf> {
    let (org, name) = model.split_once('/')?;
    if name.contains('/') || org.is_empty() || name.is_empty() {
        return None;
    }
    let repo = cache_folder()?.join(format!("models--{org}--{name}"));
    snapshot(&repo)
}

fn cache_folder() -> Option<PathBuf> {
    if let Some(cache) = std::env::var_os("HF_HUB_CACHE") {
        return Some(cache.into());
    }
    if let Some(home) = std::env::var_os("HF_HOME") {
        return Some(Path::new(&home).join("hub"));
    }
    Some(Path::new(&std::env::var_os("HOME")?).join(".cache/huggingface/hub"))
}

fn snapshot(repo: &Path) -> Option<PathBuf> {
    let commit = std::fs::read_to_string(repo.join("refs/main")).ok()?;
    let folder = repo.join("snapshots").join(commit.trim());
    folder.join("config.json").exists().then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_found_through_its_ref() {
        let dir = tempfile::tempdir().unwrap();
        let repo = dir.path().join("models--org--name");
        std::fs::create_dir_all(repo.join("refs")).unwrap();
        std::fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
        std::fs::write(repo.join("refs/main"), "abc\n").unwrap();
        assert_eq!(snapshot(&repo), None);
        std::fs::write(repo.join("snapshots/abc/config.json"), "{}").unwrap();
        assert_eq!(snapshot(&repo), Some(repo.join("snapshots/abc")));
    }
}
