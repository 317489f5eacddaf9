//! Tokens from tokens: prefill the prompt in chunks, then decode one by one.

use plimsoll_arch::Architecture;
use plimsoll_plan::{Device, DeviceError, Layout, LayoutError, lay_out_together};
use plimsoll_program::{Home, Program, Recipe, RecipeError, Target, TensorId, build};

use crate::{Sampler, SamplerError};

/// Most prompt tokens in one run of the prefill program.
const PREFILL_TOKENS: usize = 256;

/// Most bytes of inputs that go up in one piece.
const MOST_TOGETHER: u64 = 1 << 16;

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
    places: Places,
    /// Tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    logits: Vec<f32>,
    /// Whether `logits` are those of the last run.
    fetched: bool,
}

/// Offsets of what goes up and down at each run; the same in all programs of a plan.
struct Places {
    ids: u64,
    positions: u64,
    start: u64,
    last_rows: u64,
    logits: u64,
    next: u64,
    /// Nothing that matters lies between the inputs.
    together: bool,
}

impl Places {
    fn new((program, layout): &(Program, Layout)) -> Places {
        let find = |name| program.find(name).expect("every inference program has these");
        let at = |name| layout.offset(find(name));
        let names = ["ids", "positions", "start", "last_rows"];
        let inputs = names.map(find);
        let first = names.map(at).into_iter().min().unwrap_or(0);
        let end = |t: &TensorId| layout.offset(*t) + program.tensor(*t).bytes();
        let end = inputs.iter().map(end).max().unwrap_or(0);
        let mut together = end - first <= MOST_TOGETHER;
        for op in &program.ops {
            op.for_each_tensor(|t, _| {
                let offset = layout.offset(t);
                let between = offset < end && offset + program.tensor(t).bytes() > first;
                together &= !between || inputs.contains(&t);
            });
        }
        let [ids, positions, start, last_rows] = names.map(at);
        Places {
            ids,
            positions,
            start,
            last_rows,
            logits: at("logits"),
            next: at("next"),
            together,
        }
    }
}

impl<'a> Generator<'a> {
    /// A generator over a device that holds the plan's slab and weights.
    pub fn new(
        plan: &'a InferPlan,
        device: &'a mut dyn Device,
        target: &'a dyn Target,
    ) -> Generator<'a> {
        let logits = vec![0.0; plan.arch.vocab_size];
        let places = Places::new(&plan.prefill);
        Generator { plan, device, target, places, cached: Vec::new(), logits, fetched: false }
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
            let next = if sampler.is_greedy() {
                self.likeliest()?
            } else {
                sampler.next(self.logits()?, &ids)
            };
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
    ///
    /// # Errors
    /// The device's own.
    pub fn logits(&mut self) -> Result<&[f32], DeviceError> {
        if !self.fetched {
            let logits = &mut self.logits;
            self.device.download(
                Home::Device,
                self.places.logits,
                logits.len() * 4,
                &mut |bytes| {
                    logits.copy_from_slice(bytemuck::cast_slice(bytes));
                    Ok(())
                },
            )?;
            self.fetched = true;
        }
        Ok(&self.logits)
    }

    /// The token of the largest of them, which the device has found.
    fn likeliest(&mut self) -> Result<u32, DeviceError> {
        let mut next = 0;
        self.device.download(Home::Device, self.places.next, 4, &mut |bytes| {
            next = bytemuck::pod_read_unaligned::<i32>(bytes) as u32;
            Ok(())
        })?;
        Ok(next)
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

    /// Runs some tokens after those in the cache; nothing waits for them yet.
    fn run(&mut self, program: &(Program, Layout), tokens: &[u32]) -> Result<(), GenerateError> {
        self.upload_inputs(tokens)?;
        self.device.run(&program.0, &program.1, 0)?;
        self.cached.extend_from_slice(tokens);
        self.fetched = false;
        Ok(())
    }

    /// The inputs of a run, in one copy where their places allow it.
    fn upload_inputs(&mut self, tokens: &[u32]) -> Result<(), DeviceError> {
        let start = self.cached.len() as i32;
        let ids: Vec<i32> = tokens.iter().map(|t| *t as i32).collect();
        let positions: Vec<i32> = (start..).take(tokens.len()).collect();
        let p = &self.places;
        let pieces: [(u64, &[i32]); 4] = [
            (p.ids, &ids),
            (p.positions, &positions),
            (p.start, &[start]),
            (p.last_rows, &[tokens.len() as i32 - 1]),
        ];
        let mut write = |pieces: &[(u64, &[i32])]| {
            let first = pieces.iter().map(|(at, _)| *at).min().unwrap_or(0);
            let end = pieces.iter().map(|(at, v)| at + 4 * v.len() as u64).max().unwrap_or(first);
            self.device.upload(Home::Device, first, (end - first) as usize, &mut |bytes| {
                for (at, values) in pieces {
                    let at = (at - first) as usize;
                    let values = bytemuck::cast_slice(values);
                    bytes[at..at + values.len()].copy_from_slice(values);
                }
                Ok(())
            })
        };
        if p.together {
            return write(&pieces);
        }
        pieces.iter().try_for_each(|piece| write(std::slice::from_ref(piece)))
    }
}
