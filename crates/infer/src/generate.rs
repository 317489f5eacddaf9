//! Tokens from tokens: prefill the prompt in chunks, then decode one by one.

use plimsoll_arch::Architecture;
use plimsoll_plan::{Device, DeviceError, Layout, LayoutError, lay_out_together};
use plimsoll_program::{Program, Recipe, RecipeError, Target, build};

use crate::{Sampler, SamplerError};

/// Most prompt tokens in one run of the prefill program.
const PREFILL_TOKENS: usize = 256;

/// The programs of a generation and their common slab.
pub struct InferPlan {
    pub arch: Architecture,
    pub recipe: Recipe,
    /// Prefill of a full chunk; it decides the size of the slab.
    pub prefill: (Program, Layout),
    pub decode: (Program, Layout),
}

/// Why nothing was generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    #[error("token id {id} is outside the model's vocabulary of {vocab_size}")]
    TokenId { id: u32, vocab_size: usize },
    #[error(
        "{tokens} tokens do not fit in a context of {capacity}: shorten the prompt, lower --max-new-tokens or raise --context"
    )]
    TooLong { tokens: usize, capacity: usize },
}

/// What ended a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of the model's end tokens.
    EndToken,
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// The callback said so.
    Callback,
}

/// The result of one generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Tokens after the prompt; an end token is the last of them.
    pub new_ids: Vec<u32>,
    pub stop: StopReason,
    pub prefill_seconds: f64,
    pub decode_seconds: f64,
}

impl Generation {
    /// Decoded tokens a second; the first token comes out of the prefill.
    pub fn tokens_per_second(&self) -> f64 {
        self.new_ids.len().saturating_sub(1) as f64 / self.decode_seconds.max(1e-9)
    }
}

impl InferPlan {
    /// Plans generation of single sequences with a context of `recipe.seq`.
    ///
    /// # Errors
    /// The recipe is impossible.
    pub fn new(
        arch: &Architecture,
        recipe: &Recipe,
        target: &dyn Target,
    ) -> Result<InferPlan, GenerateError> {
        let chunk = PREFILL_TOKENS.min(recipe.seq);
        let prefill = build::infer(arch, recipe, chunk, target)?;
        let decode = build::infer(arch, recipe, 1, target)?;
        let mut layouts = lay_out_together(&[&prefill, &decode])?;
        let (Some(decode_layout), Some(prefill_layout)) = (layouts.pop(), layouts.pop()) else {
            unreachable!("two programs have two layouts");
        };
        Ok(InferPlan {
            arch: arch.clone(),
            recipe: recipe.clone(),
            prefill: (prefill, prefill_layout),
            decode: (decode, decode_layout),
        })
    }

    pub fn slab_bytes(&self) -> u64 {
        self.prefill.1.slab_bytes
    }
}

/// A loaded model with its KV cache.
pub struct Generator<'a> {
    plan: &'a InferPlan,
    device: &'a mut dyn Device,
    target: &'a dyn Target,
    /// Tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    logits: Vec<f32>,
}

impl<'a> Generator<'a> {
    /// A generator over a device that holds the plan's slab and weights.
    pub fn new(
        plan: &'a InferPlan,
        device: &'a mut dyn Device,
        target: &'a dyn Target,
    ) -> Generator<'a> {
        let logits = vec![0.0; plan.arch.vocab_size];
        Generator { plan, device, target, cached: Vec::new(), logits }
    }

    /// Continues `prompt` by up to `max_new_tokens`, calling `on_token` with
    /// each; it may stop the generation by returning false. What the cache
    /// already holds of the prompt is not computed again.
    ///
    /// # Errors
    /// The prompt is empty, too long, or names a token that does not exist.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_new_tokens: usize,
        stop_ids: &[u32],
        sampler: &mut Sampler,
        mut on_token: impl FnMut(u32) -> bool,
    ) -> Result<Generation, GenerateError> {
        let capacity = self.plan.recipe.seq;
        let vocab_size = self.plan.arch.vocab_size;
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        if let Some(&id) = prompt.iter().find(|id| **id as usize >= vocab_size) {
            return Err(GenerateError::TokenId { id, vocab_size });
        }
        if prompt.len() >= capacity {
            let tokens = prompt.len() + 1;
            return Err(GenerateError::TooLong { tokens, capacity });
        }
        let started = std::time::Instant::now();
        let known = self.cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // The last token is always run again: its logits are wanted.
        self.cached.truncate(known.min(prompt.len() - 1));
        self.prefill(prompt)?;
        let prefill_seconds = started.elapsed().as_secs_f64();

        let started = std::time::Instant::now();
        let mut ids = prompt.to_vec();
        let mut stop = StopReason::Length;
        for n in 0..max_new_tokens {
            let next = sampler.next(&self.logits, &ids);
            ids.push(next);
            if !on_token(next) {
                stop = StopReason::Callback;
                break;
            }
            if stop_ids.contains(&next) {
                stop = StopReason::EndToken;
                break;
            }
            if n + 1 == max_new_tokens || ids.len() >= capacity {
                break;
            }
            self.decode(next)?;
        }
        Ok(Generation {
            new_ids: ids.split_off(prompt.len()),
            stop,
            prefill_seconds,
            decode_seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Logits (V) after the last token that was run.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn prefill(&mut self, prompt: &[u32]) -> Result<(), GenerateError> {
        let plan = self.plan;
        let ids = plan.prefill.0.find("ids").expect("every program has the inputs");
        let chunk = plan.prefill.0.tensor(ids).cols();
        while self.cached.len() < prompt.len() {
            let left = &prompt[self.cached.len()..];
            let tokens = left.len().min(chunk);
            if tokens == chunk {
                self.run(&plan.prefill, &left[..tokens])?;
            } else if tokens == 1 {
                self.run(&plan.decode, &left[..1])?;
            } else {
                // The rest of a prompt has a program of its own, in the same slab.
                let rest = build::infer(&plan.arch, &plan.recipe, tokens, self.target)?;
                let mut layouts = lay_out_together(&[&plan.prefill.0, &rest])?;
                let layout = layouts.pop().expect("two programs have two layouts");
                self.run(&(rest, layout), &left[..tokens])?;
            }
        }
        Ok(())
    }

    fn decode(&mut self, token: u32) -> Result<(), GenerateError> {
        let plan = self.plan;
        self.run(&plan.decode, &[token])
    }

    /// Runs some tokens after those in the cache and fetches the last logits.
    fn run(&mut self, program: &(Program, Layout), tokens: &[u32]) -> Result<(), GenerateError> {
        let (program, layout) = program;
        let start = self.cached.len() as i32;
        let position = |i: usize| start + i as i32;
        self.write(program, layout, "ids", tokens.len(), |i| tokens[i] as i32)?;
        self.write(program, layout, "positions", tokens.len(), position)?;
        self.write(program, layout, "start", 1, |_| start)?;
        self.write(program, layout, "last_rows", 1, |_| tokens.len() as i32 - 1)?;
        self.device.run(program, layout, 0)?;
        self.cached.extend_from_slice(tokens);
        let id = program.find("logits").expect("an inference program ends in logits");
        let len = self.logits.len() * 4;
        let logits = &mut self.logits;
        self.device.download(layout.offset(id), len, &mut |bytes| {
            logits.copy_from_slice(bytemuck::cast_slice(bytes));
            Ok(())
        })?;
        Ok(())
    }

    fn write(
        &mut self,
        program: &Program,
        layout: &Layout,
        name: &str,
        len: usize,
        value: impl Fn(usize) -> i32,
    ) -> Result<(), DeviceError> {
        let id = program.find(name).expect("every program has the inputs");
        self.device.upload(layout.offset(id), len * 4, &mut |bytes| {
            let out: &mut [i32] = bytemuck::cast_slice_mut(bytes);
            for (i, x) in out.iter_mut().enumerate() {
                *x = value(i);
            }
            Ok(())
        })
    }
}
