//! `sweep ... -- COMMAND`: somebody else's trainer, measured from outside.

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;
use serde_json::{Value, json};

/// A sweep of a shell script, which gets the batch as `$1`.
fn sweep(dir: &Path, options: &str, script: &str) -> Command {
    let path = dir.join("train.sh");
    std::fs::write(&path, script).unwrap();
    let mut command = command(&format!("sweep --out {} {options} --", dir.join("out").display()));
    command.arg("sh").arg(&path).arg("{batch}").env("DIR", dir);
    command
}

fn run(command: &mut Command) -> Ran {
    finished("sweep of a trainer", command.output().unwrap())
}

fn points(dir: &Path) -> Vec<Value> {
    lines(&dir.join("out/points.jsonl"))
}

const OOM: &str = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB";

#[test]
fn up_to_the_first_point_that_runs_out_of_memory_and_no_further() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "echo $1 >> \"$DIR\"/ran; test $1 -lt 3 || {{ echo '{OOM}' >&2; exit 1; }}\n\
         sleep 0.2; echo \"rate 2.5 of $1\""
    );
    let options = r"--vary batch=1.. --seq 64 --ranks 2 --pattern rate\s([0-9.]+)";
    let ran = run(&mut sweep(dir.path(), options, &script)).ok();
    assert!(ran.stdout.contains("batch=2"), "{ran:#?}");
    let all = points(dir.path());
    assert_eq!(all.len(), 3);
    assert_eq!(all[1]["point"], json!({"batch": 2}));
    assert_eq!(all[1]["iterations_per_second"], 2.5);
    assert_eq!(all[1]["seconds_per_iteration"], 0.4);
    assert_eq!(all[1]["tokens_per_second"], 2.5 * 2.0 * 2.0 * 64.0);
    assert!(all[1]["measured_bytes"].as_u64().unwrap() > 100_000);
    assert_eq!((all[2]["status"].clone(), all[2]["message"].clone()), (json!("oom"), json!(OOM)));
    assert!(dir.path().join("out/report.html").exists());

    // The same command has nothing to do; another one is another sweep.
    run(&mut sweep(dir.path(), options, &script)).ok();
    assert_eq!(std::fs::read_to_string(dir.path().join("ran")).unwrap(), "1\n2\n3\n");
    run(sweep(dir.path(), options, &script).arg("more")).refused(&["another recipe", "more"]);
}

#[test]
fn ranks_that_wait_for_a_dead_one_are_ended() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "if test $1 = 1; then echo 2.0it/s; exit 0; fi\n\
         (while :; do :; done) & (setsid sh -c 'echo $$ > \"$DIR\"/pid; sleep 500' &)\n\
         (sleep 0.5; echo '{OOM}' >&2; exit 1) & wait"
    );
    let started = Instant::now();
    run(&mut sweep(dir.path(), "--vary batch=1..", &script)).ok();
    assert!(started.elapsed() < Duration::from_secs(25), "{:?}", started.elapsed());
    let all = points(dir.path());
    assert_eq!((all.len(), all[1]["status"].clone()), (2, json!("oom")));
    let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
    // Of one that has ended and not been waited for, the command line is empty.
    let line = std::fs::read(Path::new("/proc").join(pid.trim()).join("cmdline"));
    assert!(line.unwrap_or_default().is_empty(), "{pid} is still there");
}

#[test]
fn figures_from_a_file_of_each_rank() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"for rank in 1 0; do
        echo "{\"rank\": $rank, \"iterations_per_second\": 1.$rank, \"peak_allocated_bytes\": 5$rank}"
    done > $PLIMSOLL_RESULT; test "$2" = "$PLIMSOLL_RESULT""#;
    run(sweep(dir.path(), "--vary batch=4,8", script).arg("{result}")).ok();
    let point = &points(dir.path())[1];
    assert_eq!(point["status"], "ok", "{point}");
    assert_eq!(point["iterations_per_second"], 1.0);
    assert_eq!(point["peak_allocated_bytes"], 51);
    assert_eq!(point["peak_allocated_bytes_per_rank"], json!([50, 51]));
    assert!(dir.path().join("out/results/batch=8.json").exists());
}

#[test]
fn what_goes_wrong_is_named() {
    let status = |options: &str, script: &str| {
        let dir = tempfile::tempdir().unwrap();
        let ran = run(&mut sweep(dir.path(), options, script));
        let point = points(dir.path()).pop().unwrap();
        let message = point["message"].as_str().unwrap_or_default().to_owned();
        (ran, point["status"].as_str().unwrap().to_owned(), message)
    };
    let (ran, point, message) = status("--vary batch=1.. --timeout 1", "sleep 100");
    assert_eq!((point.as_str(), ran.status), ("timeout", Some(0)), "{message}");
    let (ran, point, message) = status("--vary batch=1..", "echo Traceback; exit 7");
    assert_eq!(point, "failed");
    assert!(message.contains("exit status: 7") && message.contains("Traceback"), "{message}");
    ran.fails(1, &["no point ran", "Traceback"]);
    let (_, point, message) = status("--vary batch=1..2", "head -c 100000 /dev/urandom");
    assert_eq!(point, "ok");
    assert!(message.contains("no rate"), "{message}");
    let (ran, point, message) = status("--vary batch=1.. --pattern r=(.*)", "echo r=fast");
    assert_eq!(point, "failed");
    assert!(message.contains("`fast`, not a number"), "{message}");
    ran.fails(1, &["`fast`"]);

    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out").display().to_string();
    plimsoll(&format!("sweep --out {out} -- /no/such/trainer {{batch}}"))
        .refused(&["/no/such/trainer"]);
    plimsoll(&format!("sweep --out {out} -- true")).refused(&["{batch}"]);
    plimsoll(&format!("sweep --out {out} --pattern [ -- true {{batch}}")).refused(&["--pattern"]);
    plimsoll(&format!("sweep --out {out} --pattern x -- true {{batch}}")).refused(&["parentheses"]);
}

/// NVML as a library of our own that says of every process whose number is in a
/// file that it holds that many MiB on the second of two GPUs.
const NVML: &str = r#"
#include <stdio.h>
#include <stdlib.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
static FILE *file(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("DIR"), name);
    return fopen(path, "r");
}
int nvmlDeviceGetMemoryInfo(void *d, memory *m) {
    unsigned long long mib = 0;
    FILE *f = file("used");
    if (f) { if (fscanf(f, "%llu", &mib) != 1) mib = 0; fclose(f); }
    m->total = 80ull << 30; m->used = (1024 + (d == (void *)2 ? mib : 0)) << 20;
    m->free = m->total - m->used;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, process *p) {
    unsigned long long mib; unsigned count = 0;
    FILE *f = d == (void *)2 ? file("processes") : 0;
    while (f && count < *n && fscanf(f, "%u %llu", &p[count].pid, &mib) == 2) {
        p[count++].used = mib << 20;
    }
    if (f) fclose(f);
    *n = count;
    return 0;
}
"#;

#[test]
fn device_memory_is_what_the_driver_says_of_the_processes() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("nvml.c");
    std::fs::write(&source, NVML).unwrap();
    let library = dir.path().join("libnvidia-ml.so.1");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source);
    if !compiler.status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no C compiler");
        return;
    }
    let measured = |script: &str| {
        let _ = std::fs::remove_dir_all(dir.path().join("out"));
        let mut command = sweep(dir.path(), "--vary batch=3..3", script);
        run(command.env("LD_LIBRARY_PATH", dir.path())).ok();
        points(dir.path()).pop().unwrap()
    };
    // Its own, a child's, and somebody else's.
    let point = measured(
        "sleep 1 & printf \"$$ 100\\n$! 50\\n1 9000\\n\" > \"$DIR\"/processes; echo 1it/s; wait",
    );
    assert_eq!(point["measured_bytes"], 150 << 20, "{point}");
    assert_eq!(point["measured_by"], "nvml-process");
    // Numbers of the host, which nobody in a container knows.
    let point = measured(
        "echo '999999999 7' > \"$DIR\"/processes; echo 70 > \"$DIR\"/used; echo 1it/s; sleep 0.5",
    );
    assert_eq!(point["measured_bytes"], 70 << 20, "{point}");
    assert_eq!(point["measured_by"], "nvml-device");
}
