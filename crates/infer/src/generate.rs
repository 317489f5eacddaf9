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
    #[error("{prompts} prompts in a plan for {batch} sequences")]
    Prompts { prompts: usize, batch: usize },
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
    /// Plans generation of `recipe.batch` sequences at a time with a context of
    /// `recipe.seq`.
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
    /// Tokens of each sequence whose keys and values are in the cache; all are as long.
    cached: Vec<Vec<u32>>,
    /// (B, V).
    logits: Vec<f32>,
    /// Whether `logits` are those of the last run.
    fetched: bool,
}

/// One sequence under way.
struct Sequence {
    /// The prompt, and what followed it.
    ids: Vec<u32>,
    prompt: usize,
    stop: Option<StopReason>,
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
        let batch = plan.recipe.batch;
        let logits = vec![0.0; batch * plan.arch.vocab_size];
        let (places, cached) = (Places::new(&plan.prefill), vec![Vec::new(); batch]);
        Generator { plan, device, target, places, cached, logits, fetched: false }
    }

    /// Continues `prompt` by up to `max_new_tokens`, calling `on_token` with
    /// each; it may stop the generation by returning false. What the cache
    /// already holds of the prompt is not computed again.
    ///
    /// # Errors
    /// The prompt is empty, too long, or names a token that does not exist; the plan is
    /// for several sequences.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_new_tokens: usize,
        stop_ids: &[u32],
        sampler: &mut Sampler,
        mut on_token: impl FnMut(u32) -> bool,
    ) -> Result<Generation, GenerateError> {
        let samplers = std::slice::from_mut(sampler);
        let on_token = |_, id| on_token(id);
        let all =
            self.generate_all(&[prompt.to_vec()], max_new_tokens, stop_ids, samplers, on_token)?;
        Ok(all.into_iter().next().expect("as many as prompts"))
    }

    /// Continues each of the plan's sequences by up to `max_new_tokens`, each with its own
    /// sampler. All are at the same position: what a prompt has beyond the shortest one
    /// goes through the token step, while the others already generate.
    ///
    /// # Errors
    /// As [`Generator::generate`]; or there are not as many prompts as the plan has
    /// sequences.
    ///
    /// # Panics
    /// There are fewer samplers than prompts.
    pub fn generate_all(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        stop_ids: &[u32],
        samplers: &mut [Sampler],
        mut on_token: impl FnMut(usize, u32) -> bool,
    ) -> Result<Vec<Generation>, GenerateError> {
        let (capacity, batch) = (self.plan.recipe.seq, self.plan.recipe.batch);
        self.check(prompts)?;
        assert!(samplers.len() >= batch, "{} samplers for {batch} sequences", samplers.len());
        let started = std::time::Instant::now();
        let shortest = prompts.iter().map(Vec::len).min().unwrap_or(0);
        let known = |(cached, prompt): (&Vec<u32>, &Vec<u32>)| {
            cached.iter().zip(prompt).take_while(|(a, b)| a == b).count()
        };
        let known = self.cached.iter().zip(prompts).map(known).min().unwrap_or(0);
        // The last token is always run again: its logits are wanted.
        self.cached.iter_mut().for_each(|c| c.truncate(known.min(shortest - 1)));
        self.prefill(prompts, shortest)?;
        let prefill_seconds = started.elapsed().as_secs_f64();

        let started = std::time::Instant::now();
        let mut sequences: Vec<Sequence> = prompts
            .iter()
            .map(|p| Sequence { ids: p.clone(), prompt: p.len(), stop: None })
            .collect();
        loop {
            // Positions that the cache holds; sequence i has a token there, or needs one.
            let at = self.cached[0].len();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                if sequence.ids.len() > at || sequence.stop.is_some() {
                    continue;
                }
                if sequence.ids.len() - sequence.prompt == max_new_tokens || at >= capacity {
                    sequence.stop = Some(StopReason::Length);
                    continue;
                }
                let next = if samplers[i].is_greedy() {
                    self.likeliest(i)?
                } else {
                    let v = self.plan.arch.vocab_size;
                    let logits = &self.logits()?[i * v..(i + 1) * v];
                    samplers[i].next(logits, &sequence.ids)
                };
                sequence.ids.push(next);
                if !on_token(i, next) {
                    sequence.stop = Some(StopReason::Callback);
                } else if stop_ids.contains(&next) {
                    sequence.stop = Some(StopReason::EndToken);
                } else if sequence.ids.len() - sequence.prompt == max_new_tokens
                    || sequence.ids.len() >= capacity
                {
                    sequence.stop = Some(StopReason::Length);
                }
            }
            if sequences.iter().all(|s| s.stop.is_some()) {
                break;
            }
            // A sequence that has ended repeats its last token: nobody reads what follows.
            let tokens: Vec<[u32; 1]> =
                sequences.iter().map(|s| [s.ids[at.min(s.ids.len() - 1)]]).collect();
            let rows: Vec<&[u32]> = tokens.iter().map(<[u32; 1]>::as_slice).collect();
            let plan = self.plan;
            self.run(&plan.decode, &rows)?;
        }
        let decode_seconds = started.elapsed().as_secs_f64();
        let finished = sequences.into_iter().map(|mut s| Generation {
            new_ids: s.ids.split_off(s.prompt),
            stop: s.stop.unwrap_or(StopReason::Length),
            prefill_seconds,
            decode_seconds,
        });
        Ok(finished.collect())
    }

    fn check(&self, prompts: &[Vec<u32>]) -> Result<(), GenerateError> {
        let (capacity, batch) = (self.plan.recipe.seq, self.plan.recipe.batch);
        let vocab_size = self.plan.arch.vocab_size;
        if prompts.len() != batch {
            return Err(GenerateError::Prompts { prompts: prompts.len(), batch });
        }
        for prompt in prompts {
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
        }
        Ok(())
    }

    /// Logits (B, V) after the last token that was run.
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

    /// The token of a sequence's largest logit, which the device has found.
    fn likeliest(&mut self, sequence: usize) -> Result<u32, DeviceError> {
        let mut next = 0;
        let at = self.places.next + 4 * sequence as u64;
        self.device.download(Home::Device, at, 4, &mut |bytes| {
            next = bytemuck::pod_read_unaligned::<i32>(bytes) as u32;
            Ok(())
        })?;
        Ok(next)
    }

    /// Runs what the cache lacks of the first `length` tokens of all prompts.
    fn prefill(&mut self, prompts: &[Vec<u32>], length: usize) -> Result<(), GenerateError> {
        let plan = self.plan;
        let ids = plan.prefill.0.find("ids").expect("every program has the inputs");
        let chunk = plan.prefill.0.tensor(ids).cols();
        while self.cached[0].len() < length {
            let at = self.cached[0].len();
            let tokens = (length - at).min(chunk);
            let rows: Vec<&[u32]> = prompts.iter().map(|p| &p[at..at + tokens]).collect();
            if tokens == chunk {
                self.run(&plan.prefill, &rows)?;
            } else if tokens == 1 {
                self.run(&plan.decode, &rows)?;
            } else {
                // The rest of a prompt has a program of its own, in the same slab.
                let rest = build::infer(&plan.arch, &plan.recipe, tokens, self.target)?;
                let mut layouts = lay_out_together(&[&plan.prefill.0, &rest])?;
                let layout = layouts.pop().expect("two programs have two layouts");
                self.run(&(rest, layout), &rows)?;
            }
        }
        Ok(())
    }

    /// Runs as many tokens of each sequence after those in the cache; nothing waits for
    /// them yet.
    fn run(&mut self, program: &(Program, Layout), rows: &[&[u32]]) -> Result<(), GenerateError> {
        self.upload_inputs(rows)?;
        self.device.run(&program.0, &program.1, 0)?;
        for (cached, row) in self.cached.iter_mut().zip(rows) {
            cached.extend_from_slice(row);
        }
        self.fetched = false;
        Ok(())
    }

    /// The inputs of a run, in one copy where their places allow it.
    fn upload_inputs(&mut self, rows: &[&[u32]]) -> Result<(), DeviceError> {
        let (start, tokens) = (self.cached[0].len() as i32, rows[0].len() as i32);
        let ids: Vec<i32> = rows.iter().flat_map(|r| r.iter().map(|t| *t as i32)).collect();
        let positions: Vec<i32> = rows.iter().flat_map(|_| start..start + tokens).collect();
        let starts = vec![start; rows.len()];
        let last_rows: Vec<i32> = (1..=rows.len() as i32).map(|b| b * tokens - 1).collect();
        let p = &self.places;
        let pieces: [(u64, &[i32]); 4] = [
            (p.ids, &ids),
            (p.positions, &positions),
            (p.start, &starts),
            (p.last_rows, &last_rows),
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
