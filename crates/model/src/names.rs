//! The tensors of a model, by their Hugging Face names.

use plimsoll_arch::Architecture;
use plimsoll_program::weight_parts;

/// Every tensor that a checkpoint of this architecture holds, in the order of
/// the forward pass, with its shape: (rows, columns) = (outputs, inputs) for a
/// projection, (V, C) for the embedding and the head. A tied head is not
/// stored. As transformers 5.24 names them.
pub fn expected_tensors(arch: &Architecture) -> Vec<(String, Vec<usize>)> {
    weight_parts(arch).into_iter().map(|part| (part.source, part.shape)).collect()
}
