//! DeepSpeed's JSON.

use crate::config::{Config, ConfigError, Keys};
use crate::recipe::{Optim, Precision, Zero};

/// Applies a DeepSpeed configuration: a file of its own, or a map inside another.
pub fn apply(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    let recipe = &mut config.recipe;
    if let Some(batch) = keys.number("train_micro_batch_size_per_gpu")? {
        recipe.batch = batch;
    }
    if let Some(steps) = keys.number("gradient_accumulation_steps")? {
        recipe.accumulate = steps;
    }
    if let Some(clip) = keys.real("gradient_clipping")? {
        recipe.max_grad_norm = clip > 0.0;
    }
    let mut rests = Vec::new();
    for key in ["fp16", "bf16", "bfloat16"] {
        let Some(mut half) = keys.inner(key)? else { continue };
        if half.flag("enabled")? == Some(true) {
            config.recipe.precision = Precision::Pure16;
        }
        half.ignore(&[
            "loss_scale",
            "loss_scale_window",
            "initial_scale_power",
            "hysteresis",
            "min_loss_scale",
            "consecutive_hysteresis",
            "auto_cast",
            "enabled",
        ]);
        rests.push(half);
    }
    if let Some(mut optimizer) = keys.inner("optimizer")? {
        let kind = optimizer.text("type")?;
        if let Some(name) = kind {
            config.recipe.optim = match name.to_lowercase().as_str() {
                // FusedAdam, in one kernel.
                "adam" | "adamw" | "fusedadam" => Optim::AdamWFused,
                "sgd" => Optim::Sgd,
                _ => {
                    let expected = "AdamW, Adam and SGD are known";
                    return Err(optimizer.error("type", &name.into(), expected));
                }
            };
        }
        optimizer.ignore(&["params", "legacy_fusion"]);
        rests.push(optimizer);
    }
    if let Some(mut zero) = keys.inner("zero_optimization")? {
        let stage = zero.number("stage")?.unwrap_or(0);
        if stage > 3 {
            return Err(zero.error("stage", &stage.into(), "stages are 0, 1, 2 and 3"));
        }
        let mut plan = Zero::stage(stage as u8);
        for (key, slot) in [
            ("reduce_bucket_size", &mut plan.reduce_bucket_size),
            ("stage3_prefetch_bucket_size", &mut plan.prefetch_bucket_size),
            ("stage3_param_persistence_threshold", &mut plan.param_persistence_threshold),
        ] {
            if let Some(value) = zero.number(key)? {
                *slot = value;
            }
        }
        if let Some(overlap) = zero.flag("overlap_comm")? {
            plan.overlap_comm = overlap;
        }
        for (key, slot) in [
            ("offload_optimizer", &mut plan.offload_optimizer),
            ("offload_param", &mut plan.offload_param),
        ] {
            let Some(mut offload) = zero.inner(key)? else { continue };
            *slot = match offload.text("device")?.as_deref() {
                None | Some("none") => false,
                Some("cpu" | "nvme") => true,
                Some(other) => {
                    let expected = "devices are cpu, nvme and none";
                    return Err(offload.error("device", &other.into(), expected));
                }
            };
            offload.ignore(&[
                "pin_memory",
                "buffer_count",
                "fast_init",
                "nvme_path",
                "buffer_size",
                "max_in_cpu",
                "ratio",
                "pipeline_read",
                "pipeline_write",
            ]);
            rests.push(offload);
        }
        if zero.flag("cpu_offload")? == Some(true) {
            plan.offload_optimizer = true;
        }
        zero.ignore(&[
            "allgather_partitions",
            "allgather_bucket_size",
            "reduce_scatter",
            "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ]);
        config.recipe.zero = Some(plan);
        rests.push(zero);
    }
    if config.recipe.zero.is_none() {
        config.recipe.zero = Some(Zero::stage(0));
    }
    for rest in rests {
        rest.rest(config);
    }
    keys.ignore(&[
        "train_batch_size",
        "steps_per_print",
        "wall_clock_breakdown",
        "scheduler",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "prescale_gradients",
        "communication_data_type",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comms_logger",
        "flops_profiler",
        "dump_state",
        "gradient_predivide_factor",
        "checkpoint",
    ]);
    Ok(())
}
