//! The configurations of axolotl and LLaMA-Factory, and transformers' TrainingArguments.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::{Config, ConfigError, Keys, deepspeed, read_map};
use crate::recipe::{
    Attention, Bnb4bit, Checkpointing, Fsdp, Liger, Lora, Method, Optim, Precision,
};

const ALL_LINEAR: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Keys of TrainingArguments that change no memory of a step.
const WITHOUT_EFFECT: [&str; 96] = [
    "output_dir",
    "overwrite_output_dir",
    "do_train",
    "do_eval",
    "do_predict",
    "eval_strategy",
    "evaluation_strategy",
    "prediction_loss_only",
    "per_device_eval_batch_size",
    "eval_delay",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "num_train_epochs",
    "max_steps",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_ratio",
    "warmup_steps",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "logging_dir",
    "logging_strategy",
    "logging_first_step",
    "logging_steps",
    "logging_nan_inf_filter",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_safetensors",
    "save_only_model",
    "save_on_each_node",
    "restore_callback_states_from_checkpoint",
    "no_cuda",
    "use_cpu",
    "use_mps_device",
    "seed",
    "data_seed",
    "use_ipex",
    "local_rank",
    "ddp_backend",
    "dataloader_drop_last",
    "eval_steps",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "past_index",
    "run_name",
    "disable_tqdm",
    "remove_unused_columns",
    "label_names",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "ignore_data_skip",
    "label_smoothing_factor",
    "length_column_name",
    "report_to",
    "ddp_timeout",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "skip_memory_metrics",
    "push_to_hub",
    "resume_from_checkpoint",
    "hub_model_id",
    "hub_strategy",
    "hub_token",
    "hub_private_repo",
    "hub_always_push",
    "hub_revision",
    "include_inputs_for_metrics",
    "include_for_metrics",
    "eval_do_concat_batches",
    "mp_parameters",
    "full_determinism",
    "ray_scope",
    "include_tokens_per_second",
    "include_num_input_tokens_seen",
    "batch_eval_metrics",
    "eval_on_start",
    "use_legacy_prediction_loop",
    "eval_use_gather_object",
    "average_tokens_across_devices",
    "accelerator_config",
    "parallelism_config",
    "jit_mode_eval",
    "fp16_opt_level",
    "half_precision_backend",
    "bf16_full_eval",
    "fp16_full_eval",
    "eval_accumulation_steps",
    "debug",
    "group_by_length",
    "project",
];

/// What `TrainingArguments` and everything built on it share.
fn common(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    if let Some(batch) = keys.number("per_device_train_batch_size")? {
        config.recipe.batch = batch;
    }
    if let Some(steps) = keys.number("gradient_accumulation_steps")? {
        config.recipe.accumulate = steps;
    }
    if let Some(norm) = keys.real("max_grad_norm")? {
        config.recipe.max_grad_norm = norm > 0.0;
    }
    let name = keys.text("optim")?;
    // What the Trainer of transformers 5 takes where nothing is said.
    config.recipe.optim = match name {
        None => Optim::AdamWFused,
        Some(name) => Optim::named(&name)
            .map_err(|error| ConfigError::Recipe { path: keys.path.clone(), error })?,
    };
    checkpointing(keys, config)?;
    if keys.flag("use_liger_kernel")?.unwrap_or(false) {
        config.recipe.liger = Liger::ALL;
    }
    if let Some(mut liger) = keys.inner("liger_kernel_config")? {
        for (key, slot) in [
            ("rms_norm", &mut config.recipe.liger.rms_norm),
            ("rope", &mut config.recipe.liger.rope),
            ("swiglu", &mut config.recipe.liger.swiglu),
            ("fused_linear_cross_entropy", &mut config.recipe.liger.fused_linear_cross_entropy),
        ] {
            if let Some(on) = liger.flag(key)? {
                *slot = on;
            }
        }
        liger.rest(config);
    }
    if keys.flag("torch_compile")?.unwrap_or(false) {
        config.recipe.compile = true;
    }
    keys.ignore(&["torch_compile_backend", "torch_compile_mode"]);
    sharding(keys, config)
}

fn checkpointing(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    let on = match keys.take("gradient_checkpointing") {
        // axolotl has a variant that also offloads; the recomputation is the same.
        Some(Value::String(text)) if text.starts_with("unsloth") || text == "offload" => true,
        Some(value) => {
            keys.map.insert("gradient_checkpointing".into(), value);
            keys.flag("gradient_checkpointing")?.unwrap_or(false)
        }
        None => false,
    };
    let mut use_reentrant = config.recipe.transformers < crate::recipe::Version(5, 0);
    if let Some(mut kwargs) = keys.inner("gradient_checkpointing_kwargs")? {
        use_reentrant = kwargs.flag("use_reentrant")?.unwrap_or(use_reentrant);
        kwargs.rest(config);
    }
    config.recipe.gradient_checkpointing = on.then_some(Checkpointing { use_reentrant });
    Ok(())
}

/// `deepspeed` (a map or a file) and `fsdp`.
fn sharding(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    match keys.take("deepspeed") {
        None | Some(Value::Bool(false)) => {}
        Some(Value::Object(map)) => {
            let prefix = "deepspeed.".to_owned();
            let mut inner = Keys { path: keys.path.clone(), prefix, map, ignored: Vec::new() };
            deepspeed::apply(&mut inner, config)?;
            inner.rest(config);
        }
        Some(Value::String(file)) => {
            let path = beside(&keys.path, &file);
            let mut inner = Keys::new(&path, read_map(&path)?);
            inner.prefix = format!("{file}: ");
            deepspeed::apply(&mut inner, config)?;
            inner.rest(config);
        }
        Some(value) => return Err(keys.error("deepspeed", &value, "give a file or a map")),
    }
    if let Some(zero) = &mut config.recipe.zero {
        // The arguments exist before the model is loaded, so transformers enters zero.Init.
        zero.zero_init = zero.stage == 3;
    }
    let modes = match keys.take("fsdp") {
        None | Some(Value::Bool(false)) => Vec::new(),
        Some(Value::Bool(true)) => vec!["full_shard".to_owned()],
        Some(Value::String(text)) => text.split_whitespace().map(str::to_owned).collect(),
        Some(Value::Array(items)) => {
            items.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect()
        }
        Some(value) => return Err(keys.error("fsdp", &value, "give names such as full_shard")),
    };
    let mut fsdp = Fsdp { reshard_after_forward: true, cpu_offload: false };
    for mode in &modes {
        match mode.as_str() {
            "full_shard" | "auto_wrap" | "hybrid_shard" => {}
            "shard_grad_op" => fsdp.reshard_after_forward = false,
            "offload" => fsdp.cpu_offload = true,
            _ => {
                let expected = "known are full_shard, shard_grad_op, offload and auto_wrap";
                return Err(keys.error("fsdp", &Value::String(mode.clone()), expected));
            }
        }
    }
    if let Some(mut inner) = keys.inner("fsdp_config")? {
        if let Some(reshard) = inner.flag("reshard_after_forward")? {
            fsdp.reshard_after_forward = reshard;
        }
        for key in ["offload_params", "fsdp_offload_params"] {
            fsdp.cpu_offload |= inner.flag(key)?.unwrap_or(false);
        }
        if inner.flag("activation_checkpointing")?.unwrap_or(false) {
            config.recipe.gradient_checkpointing = Some(Checkpointing { use_reentrant: false });
        }
        inner.ignore(&[
            "fsdp_version",
            "version",
            "auto_wrap_policy",
            "transformer_layer_cls_to_wrap",
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_auto_wrap_policy",
            "state_dict_type",
            "fsdp_state_dict_type",
            "min_num_params",
            "xla",
            "xla_fsdp_v2",
            "xla_fsdp_grad_ckpt",
            "cpu_ram_efficient_loading",
            "sync_module_states",
        ]);
        inner.rest(config);
    }
    if !modes.is_empty() {
        config.recipe.fsdp = Some(fsdp);
    }
    Ok(())
}

/// A file that another names: as it stands, or beside the file that names it.
fn beside(path: &Path, file: &str) -> PathBuf {
    let direct = PathBuf::from(file);
    let relative = path.parent().map_or_else(|| direct.clone(), |folder| folder.join(file));
    if relative.exists() { relative } else { direct }
}

/// Precision of the Trainer: autocast over weights in the type that they are loaded in.
fn precision(config: &mut Config, bf16: bool, fp16: bool, weights: Option<&str>) {
    let weights16 = match weights {
        Some("float32" | "fp32") => false,
        Some("bfloat16" | "bf16" | "float16" | "fp16") => true,
        // transformers 5 keeps the type of the checkpoint, which is bf16 for these
        // families; a gradient scaler needs float32 weights.
        _ => !fp16 || config.recipe.quant.is_some(),
    };
    let sharded = config.recipe.zero.is_some_and(|z| z.stage > 0);
    config.recipe.precision = if sharded && (bf16 || fp16) {
        Precision::Pure16
    } else if bf16 || fp16 {
        Precision::Autocast16 { weights16 }
    } else if weights16 && weights.is_some() {
        Precision::Pure16
    } else if sharded {
        config.recipe.precision
    } else {
        Precision::Float32
    };
}

/// `TrainingArguments.to_json_file`.
pub fn training_arguments(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    common(keys, config)?;
    let bf16 = keys.flag("bf16")?.unwrap_or(false);
    let fp16 = keys.flag("fp16")?.unwrap_or(false);
    both(keys, bf16, fp16)?;
    precision(config, bf16, fp16, None);
    // Of trl's SFTConfig.
    for key in ["max_length", "max_seq_length"] {
        if let Some(length) = keys.number(key)? {
            config.recipe.seq = length;
        }
    }
    config.recipe.padded = !keys.flag("packing")?.unwrap_or(false);
    keys.ignore(&WITHOUT_EFFECT);
    keys.ignore(&["tf32", "dataset_text_field", "dataset_num_proc", "packing_strategy"]);
    Ok(())
}

fn both(keys: &Keys, bf16: bool, fp16: bool) -> Result<(), ConfigError> {
    if bf16 && fp16 {
        return Err(keys.error("fp16", &Value::Bool(true), "bf16 and fp16 exclude each other"));
    }
    Ok(())
}

/// The modules that carry adapters.
fn targets(keys: &Keys, key: &str, value: Option<Value>) -> Result<Vec<String>, ConfigError> {
    let names: Vec<String> = match &value {
        None => Vec::new(),
        Some(Value::Array(items)) => {
            items.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect()
        }
        Some(Value::String(text)) => {
            text.split(',').map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()).collect()
        }
        Some(value) => return Err(keys.error(key, value, "give names of modules")),
    };
    if names.iter().any(|n| n == "all" || n == "all-linear") {
        return Ok(ALL_LINEAR.map(str::to_owned).to_vec());
    }
    if let Some(name) = names.iter().find(|n| !ALL_LINEAR.contains(&n.as_str())) {
        let expected = "modules are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
        return Err(keys.error(key, &Value::String(name.clone()), expected));
    }
    Ok(names)
}

fn strings(value: Option<Value>) -> Vec<String> {
    match value {
        Some(Value::Array(items)) => {
            items.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect()
        }
        Some(Value::String(text)) => {
            text.split(',').map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()).collect()
        }
        _ => Vec::new(),
    }
}

/// axolotl's YAML.
pub fn axolotl(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    config.model = keys.text("base_model")?;
    if let Some(batch) = keys.number("micro_batch_size")? {
        config.recipe.batch = batch;
    }
    if let Some(length) = keys.number("sequence_len")? {
        config.recipe.seq = length;
    }
    // Its names for what TrainingArguments has too.
    let optimizer = keys.map.remove("optimizer");
    if let Some(optimizer) = optimizer {
        keys.map.insert("optim".into(), optimizer);
    }
    common(keys, config)?;
    let bit4 = keys.flag("load_in_4bit")?.unwrap_or(false);
    let bit8 = keys.flag("load_in_8bit")?.unwrap_or(false);
    if bit8 {
        let expected = "8-bit weights are not planned; use load_in_4bit or none";
        return Err(keys.error("load_in_8bit", &Value::Bool(true), expected));
    }
    let adapter = keys.text("adapter")?;
    let linear = keys.flag("lora_target_linear")?.unwrap_or(false);
    let value = keys.take("lora_target_modules");
    let mut modules = targets(keys, "lora_target_modules", value)?;
    if linear {
        modules = ALL_LINEAR.map(str::to_owned).to_vec();
    }
    let (rank, dropout) = (keys.number("lora_r")?, keys.real("lora_dropout")?);
    let saved = strings(keys.take("lora_modules_to_save"));
    match adapter.as_deref() {
        None | Some("") => {}
        Some("lora" | "qlora") => {
            if modules.is_empty() {
                return Err(keys.error(
                    "lora_target_modules",
                    &Value::Null,
                    "name the modules that carry adapters, or set lora_target_linear",
                ));
            }
            config.recipe.method = Method::Lora(Lora {
                r: rank.unwrap_or(8),
                target_modules: modules,
                lora_dropout: dropout.unwrap_or(0.0) > 0.0,
                float32: true,
                modules_to_save: saved,
            });
        }
        Some(other) => {
            let other = Value::String(other.to_owned());
            return Err(keys.error("adapter", &other, "adapters are lora and qlora"));
        }
    }
    if adapter.as_deref() == Some("qlora") && !bit4 {
        let expected = "adapter: qlora needs load_in_4bit: true";
        return Err(keys.error("load_in_4bit", &Value::Bool(false), expected));
    }
    if bit4 {
        // Double quantization is what axolotl asks bitsandbytes for, and it prepares the
        // model for training in few bits.
        config.recipe.quant = Some(Bnb4bit { double_quant: true, prepare: true });
    }
    let flags = |keys: &mut Keys, name: &str| -> Result<bool, ConfigError> {
        // `bf16: auto` means yes where the device can.
        if keys.map.get(name).and_then(Value::as_str) == Some("auto") {
            keys.map.remove(name);
            return Ok(name == "bf16");
        }
        Ok(keys.flag(name)?.unwrap_or(false))
    };
    let (bf16, fp16) = (flags(keys, "bf16")?, flags(keys, "fp16")?);
    both(keys, bf16, fp16)?;
    let (pure, half) = (flags(keys, "bfloat16")?, flags(keys, "float16")?);
    // It loads the model in the type that it computes in.
    let weights = if bf16 || pure || fp16 && bit4 || half { Some("bfloat16") } else { None };
    precision(config, bf16, fp16, weights);
    let flash = keys.flag("flash_attention")?.unwrap_or(false);
    let eager = keys.flag("eager_attention")?.unwrap_or(false);
    // SDPA is what it takes where nothing is said.
    keys.ignore(&["sdp_attention"]);
    config.recipe.attention = match (flash, eager) {
        (true, _) => Attention::FlashAttention2,
        (_, true) => Attention::Eager,
        _ => Attention::Sdpa,
    };
    let packed = keys.flag("sample_packing")?.unwrap_or(false);
    config.recipe.padded = !packed && !flash;
    for (key, kernel) in [
        ("liger_rms_norm", 0),
        ("liger_rope", 1),
        ("liger_glu_activation", 2),
        ("liger_swiglu", 2),
        ("liger_fused_linear_cross_entropy", 3),
    ] {
        let Some(on) = keys.flag(key)? else { continue };
        let liger = &mut config.recipe.liger;
        let slot = match kernel {
            0 => &mut liger.rms_norm,
            1 => &mut liger.rope,
            2 => &mut liger.swiglu,
            _ => &mut liger.fused_linear_cross_entropy,
        };
        *slot = on;
    }
    // Its default: PYTORCH_ALLOC_CONF with expandable segments and rounding by sixteenths.
    config.allocator.expandable_segments = true;
    config.allocator.roundup_power2_divisions = 16;
    keys.ignore(&WITHOUT_EFFECT);
    keys.ignore(&[
        "datasets",
        "test_datasets",
        "dataset_prepared_path",
        "val_set_size",
        "chat_template",
        "special_tokens",
        "tokens",
        "lr_scheduler",
        "num_epochs",
        "wandb_project",
        "wandb_entity",
        "wandb_watch",
        "wandb_name",
        "wandb_run_id",
        "wandb_log_model",
        "mlflow_experiment_name",
        "train_on_inputs",
        "model_type",
        "tokenizer_type",
        "base_model_config",
        "tokenizer_config",
        "is_llama_derived_model",
        "trust_remote_code",
        "strict",
        "pad_to_sequence_len",
        "lora_alpha",
        "lora_model_dir",
        "saves_per_epoch",
        "evals_per_epoch",
        "eval_sample_packing",
        "eval_table_size",
        "eval_max_new_tokens",
        "early_stopping_patience",
        "tf32",
        "logging_steps",
        "plugins",
        "hub_model_id",
        "shuffle_merged_datasets",
        "lora_fan_in_fan_out",
        "cosine_min_lr_ratio",
        "seed",
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
        "xformers_attention",
        "save_first_step",
        "dataset_processes",
        "adam_beta2",
        "adam_epsilon",
        "rl",
    ]);
    Ok(())
}

/// LLaMA-Factory's YAML.
pub fn llama_factory(keys: &mut Keys, config: &mut Config) -> Result<(), ConfigError> {
    config.model = keys.text("model_name_or_path")?;
    // Its default of cutoff_len.
    config.recipe.seq = keys.number("cutoff_len")?.unwrap_or(2048);
    let off = keys.flag("disable_gradient_checkpointing")?.unwrap_or(false);
    let reentrant = keys.flag("use_reentrant_gc")?.unwrap_or(true);
    if keys.flag("enable_liger_kernel")?.unwrap_or(false) {
        keys.map.insert("use_liger_kernel".into(), Value::Bool(true));
    }
    if !keys.map.contains_key("optim") {
        keys.map.insert("optim".into(), Value::String("adamw_torch".into()));
    }
    common(keys, config)?;
    // Checkpointing is on unless it is turned off.
    config.recipe.gradient_checkpointing =
        (!off).then_some(Checkpointing { use_reentrant: reentrant });
    let bits = keys.number("quantization_bit")?;
    let double = keys.flag("double_quantization")?.unwrap_or(true);
    match bits {
        None => {}
        Some(4) => config.recipe.quant = Some(Bnb4bit { double_quant: double, prepare: false }),
        Some(bits) => {
            return Err(keys.error("quantization_bit", &bits.into(), "4 bits are planned"));
        }
    }
    let kind = keys.text("finetuning_type")?.unwrap_or_else(|| "lora".to_owned());
    let value = keys.take("lora_target").or_else(|| Some(Value::String("all".into())));
    let modules = targets(keys, "lora_target", value)?;
    let (rank, dropout) = (keys.number("lora_rank")?, keys.real("lora_dropout")?);
    let saved = strings(keys.take("additional_target"));
    let pure = keys.flag("pure_bf16")?.unwrap_or(false);
    match kind.as_str() {
        "full" => {
            if bits.is_some() {
                let expected = "weights in few bits cannot be trained in full";
                return Err(keys.error("finetuning_type", &Value::String(kind), expected));
            }
        }
        "lora" => {
            config.recipe.method = Method::Lora(Lora {
                r: rank.unwrap_or(8),
                target_modules: modules,
                lora_dropout: dropout.unwrap_or(0.0) > 0.0,
                float32: !pure,
                modules_to_save: saved,
            });
        }
        _ => {
            let expected = "planned are full and lora";
            return Err(keys.error("finetuning_type", &Value::String(kind), expected));
        }
    }
    let bf16 = keys.flag("bf16")?.unwrap_or(false);
    let fp16 = keys.flag("fp16")?.unwrap_or(false);
    both(keys, bf16, fp16)?;
    // It loads in the type of compute, and casts what is trained to float32 unless pure.
    let full = config.recipe.method == Method::Full;
    let weights = if full && !pure { Some("float32") } else { Some("bfloat16") };
    if pure {
        config.recipe.precision = Precision::Pure16;
    } else {
        precision(config, bf16, fp16, weights);
    }
    config.recipe.attention = match keys.text("flash_attn")?.as_deref() {
        None | Some("auto" | "sdpa") => Attention::Sdpa,
        Some("fa2") => Attention::FlashAttention2,
        Some("disabled" | "off") => Attention::Eager,
        Some(other) => {
            let other = Value::String(other.to_owned());
            return Err(keys.error("flash_attn", &other, "known are auto, sdpa, fa2, disabled"));
        }
    };
    let packed = keys.flag("packing")?.unwrap_or(false);
    config.recipe.padded = !packed && config.recipe.attention != Attention::FlashAttention2;
    keys.ignore(&WITHOUT_EFFECT);
    keys.ignore(&[
        "stage",
        "dataset",
        "dataset_dir",
        "eval_dataset",
        "template",
        "max_samples",
        "overwrite_cache",
        "preprocessing_num_workers",
        "plot_loss",
        "val_size",
        "lora_alpha",
        "adapter_name_or_path",
        "trust_remote_code",
        "quantization_method",
        "tokenized_path",
        "image_max_pixels",
        "video_max_pixels",
        "mask_history",
        "train_on_prompt",
        "streaming",
        "cache_dir",
        "hf_hub_token",
        "use_fast_tokenizer",
        "upcast_layernorm",
    ]);
    Ok(())
}
