//! Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), laid out as PEFT 0.18 does:
//! y = W x + scale B (A x), with A (rank, K) and B (N, rank) trained and W frozen.

use plimsoll_arch::Architecture;
use serde::Serialize;

use crate::{RecipeError, WeightPart};

/// The projections of a block that can carry an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Projection {
    #[serde(rename = "q_proj")]
    Q,
    #[serde(rename = "k_proj")]
    K,
    #[serde(rename = "v_proj")]
    V,
    #[serde(rename = "o_proj")]
    O,
    #[serde(rename = "gate_proj")]
    Gate,
    #[serde(rename = "up_proj")]
    Up,
    #[serde(rename = "down_proj")]
    Down,
}

impl Projection {
    pub const ALL: [Projection; 7] = [
        Projection::Q,
        Projection::K,
        Projection::V,
        Projection::O,
        Projection::Gate,
        Projection::Up,
        Projection::Down,
    ];

    /// The module's name in a Hugging Face model.
    pub fn name(self) -> &'static str {
        match self {
            Projection::Q => "q_proj",
            Projection::K => "k_proj",
            Projection::V => "v_proj",
            Projection::O => "o_proj",
            Projection::Gate => "gate_proj",
            Projection::Up => "up_proj",
            Projection::Down => "down_proj",
        }
    }

    /// The module's path inside a block.
    pub fn path(self) -> &'static str {
        match self {
            Projection::Q => "self_attn.q_proj",
            Projection::K => "self_attn.k_proj",
            Projection::V => "self_attn.v_proj",
            Projection::O => "self_attn.o_proj",
            Projection::Gate => "mlp.gate_proj",
            Projection::Up => "mlp.up_proj",
            Projection::Down => "mlp.down_proj",
        }
    }

    /// (outputs, inputs).
    pub fn shape(self, arch: &Architecture) -> (usize, usize) {
        let (c, i) = (arch.hidden_size, arch.intermediate_size);
        match self {
            Projection::Q => (arch.q_width(), c),
            Projection::K | Projection::V => (arch.kv_width(), c),
            Projection::O => (c, arch.q_width()),
            Projection::Gate | Projection::Up => (i, c),
            Projection::Down => (c, i),
        }
    }
}

/// The products of a block: projections that read the same input are one.
pub const PRODUCTS: [(&str, &[Projection]); 4] = [
    ("attn.qkv", &[Projection::Q, Projection::K, Projection::V]),
    ("attn.o", &[Projection::O]),
    ("mlp.gate_up", &[Projection::Gate, Projection::Up]),
    ("mlp.down", &[Projection::Down]),
];

/// Adapters of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lora {
    pub rank: usize,
    pub alpha: f32,
    /// Scale by alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank.
    pub rslora: bool,
    /// Probability with which an adapter's input is dropped in training.
    pub dropout: f32,
    pub targets: Vec<Projection>,
    /// Trained in full beside the adapters (`modules_to_save`).
    pub save_embed_tokens: bool,
    pub save_lm_head: bool,
}

impl Default for Lora {
    fn default() -> Lora {
        Lora {
            rank: 16,
            alpha: 32.0,
            rslora: false,
            dropout: 0.0,
            targets: Projection::ALL.to_vec(),
            save_embed_tokens: false,
            save_lm_head: false,
        }
    }
}

impl Lora {
    /// What B A x is multiplied with.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f32;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// # Errors
    /// The rank is 0 or above a projection's dimensions, a number is out of range,
    /// or there is nothing to train.
    pub fn check(&self, arch: &Architecture) -> Result<(), RecipeError> {
        let trains = self.save_embed_tokens || self.save_lm_head;
        if self.targets.is_empty() && !trains {
            return Err(RecipeError::NoTargets);
        }
        for target in &self.targets {
            let (outputs, inputs) = target.shape(arch);
            let max = outputs.min(inputs);
            if self.rank == 0 || self.rank > max {
                let (rank, target) = (self.rank, target.name());
                return Err(RecipeError::Rank { rank, target, outputs, inputs });
            }
        }
        let scale = self.scale();
        if !(self.alpha.is_finite() && self.alpha > 0.0 && scale.is_finite()) {
            return Err(RecipeError::Alpha { alpha: self.alpha });
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(RecipeError::Dropout { dropout: self.dropout });
        }
        if self.save_lm_head && arch.tie_word_embeddings {
            return Err(RecipeError::TiedHead);
        }
        Ok(())
    }

    /// The adapters that a product carries, in the order of its outputs.
    pub fn of_product(&self, projections: &[Projection]) -> Vec<Projection> {
        projections.iter().copied().filter(|p| self.targets.contains(p)).collect()
    }

    /// Every tensor of the adapter's checkpoint, with PEFT's names. The A of
    /// projections with one input lie one below the other in one tensor.
    pub fn parts(&self, arch: &Architecture) -> Vec<WeightPart> {
        let mut parts = Vec::new();
        for l in 0..arch.num_hidden_layers {
            for (product, projections) in PRODUCTS {
                for (n, projection) in self.of_product(projections).into_iter().enumerate() {
                    let (outputs, inputs) = projection.shape(arch);
                    let source = format!("base_model.model.model.layers.{l}.{}", projection.path());
                    let tensor = format!("layers.{l}.{product}");
                    parts.push(WeightPart {
                        tensor: format!("{tensor}.lora_a"),
                        source: format!("{source}.lora_A.weight"),
                        row: n * self.rank,
                        shape: vec![self.rank, inputs],
                    });
                    parts.push(WeightPart {
                        tensor: format!("{tensor}.{}.lora_b", projection.name()),
                        source: format!("{source}.lora_B.weight"),
                        row: 0,
                        shape: vec![outputs, self.rank],
                    });
                }
            }
        }
        let (v, c) = (arch.vocab_size, arch.hidden_size);
        let head = "base_model.model.lm_head.weight";
        let tied = self.save_embed_tokens && arch.tie_word_embeddings;
        let saved = [
            (self.save_embed_tokens, "embed_tokens", "base_model.model.model.embed_tokens.weight"),
            (self.save_lm_head, "lm_head", head),
            // With `ensure_weight_tying` PEFT writes what is one tensor twice.
            (tied, "embed_tokens", head),
        ];
        for (_, tensor, source) in saved.into_iter().filter(|s| s.0) {
            let (tensor, source) = (tensor.to_owned(), source.to_owned());
            parts.push(WeightPart { tensor, source, row: 0, shape: vec![v, c] });
        }
        parts
    }
}
