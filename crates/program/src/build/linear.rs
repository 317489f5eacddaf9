//! Matrix products with what hangs on them: weights in four bits, adapters,
//! gradients of whatever is trained.

use super::builder::{Builder, Linear, Param, Weight};
use super::optimizer::gradient_complete;
use crate::{OpKind, Phase, TensorId, View};

/// Rows up to which a product with a matrix in four bits reads the codes
/// themselves; above, the matrix is multiplied out first.
pub(super) const FEW_ROWS: usize = 8;

/// y (B, T, N) = x (B, T, K) w (N, K)^T [+ bias] [+ add], adapters included.
/// Returns what their backward needs: scale A x (B, T, adapters * rank). Where
/// that is there already, it is not computed again.
pub(super) fn linear(
    b: &mut Builder,
    x: TensorId,
    linear: &Linear,
    bias: Option<Param>,
    add: Option<TensorId>,
    y: TensorId,
    low: Option<TensorId>,
) -> Option<TensorId> {
    let (xv, yv) = (b.view(x), b.view(y));
    let add = add.map(|t| b.view(t));
    product(b, xv, linear, bias, add, yv);
    let adapters = linear.adapters.as_ref()?;
    let lora = b.recipe.lora.as_ref().expect("adapters come from a recipe");
    let (rank, scale) = (lora.rank, lora.scale());
    let low = low.unwrap_or_else(|| {
        let low = b.activation(format!("{}.low", linear.name), adapters.b.len() * rank);
        let dropped = dropped(b, x, linear, adapters.a);
        let (x, w, y) = (b.view(dropped), b.view(b.value(adapters.a)), b.view(low));
        b.op(OpKind::Linear { x, w, bias: None, add: None, y, scale });
        low
    });
    for (n, output) in adapters.b.iter().enumerate() {
        let x = b.view(low).cols_at(n * rank, rank);
        let w = b.view(b.value(output.b));
        let y = yv.cols_at(output.col, output.cols);
        b.op(OpKind::Linear { x, w, bias: None, add: Some(y), y, scale: 1.0 });
    }
    Some(low)
}

/// The gradients of a product whose output has the gradient d_y (B, T, N): of its
/// weight and adapters where they are trained, and d_x (B, T, K) where somebody
/// asks for it. The last use of the weight in this step.
pub(super) fn linear_backward(
    b: &mut Builder,
    d_y: TensorId,
    x: TensorId,
    linear: &Linear,
    low: Option<TensorId>,
    d_x: Option<TensorId>,
) {
    // Before the input's gradient, which may take the memory of x.
    if let Some(param) = linear.param() {
        weight_gradient(b, b.view(d_y), b.view(x), param);
    }
    let d_low = adapter_gradients(b, d_y, x, linear, low);
    if let Some(d_x) = d_x {
        let (d_y, w, d_x) = (b.view(d_y), dense(b, linear), b.view(d_x));
        b.op(OpKind::LinearBackwardInput { d_y, w, d_x, accumulate: false, scale: 1.0 });
    }
    if let (Some(d_low), Some(d_x), Some(adapters)) = (d_low, d_x, &linear.adapters) {
        let a = b.view(b.value(adapters.a));
        let probability = b.recipe.lora.as_ref().map_or(0.0, |l| l.dropout);
        if probability > 0.0 {
            let d_dropped = b.activation(format!("{}.d_dropped", linear.name), a.cols);
            input_gradient(b, b.view(d_low), a, b.view(d_dropped), false, 1.0);
            dropout(b, d_dropped, d_x, adapters.a, true);
        } else {
            input_gradient(b, b.view(d_low), a, b.view(d_x), true, 1.0);
        }
    }
    if let Some(adapters) = &linear.adapters {
        gradient_complete(b, adapters.a);
        adapters.b.iter().for_each(|output| gradient_complete(b, output.b));
    }
    if let Some(param) = linear.param() {
        gradient_complete(b, param);
    }
}

/// d_B, d_A, and the gradient of scale A x before its scale is applied backwards.
fn adapter_gradients(
    b: &mut Builder,
    d_y: TensorId,
    x: TensorId,
    linear: &Linear,
    low: Option<TensorId>,
) -> Option<TensorId> {
    let (adapters, low) = (linear.adapters.as_ref()?, low?);
    b.gradient(adapters.a)?;
    let lora = b.recipe.lora.as_ref().expect("adapters come from a recipe");
    let (rank, scale) = (lora.rank, lora.scale());
    let d_low = b.activation(format!("{}.d_low", linear.name), adapters.b.len() * rank);
    for (n, output) in adapters.b.iter().enumerate() {
        let d_y = b.view(d_y).cols_at(output.col, output.cols);
        weight_gradient(b, d_y, b.view(low).cols_at(n * rank, rank), output.b);
        let d_low = b.view(d_low).cols_at(n * rank, rank);
        input_gradient(b, d_y, b.view(b.value(output.b)), d_low, false, scale);
    }
    let dropped = dropped(b, x, linear, adapters.a);
    weight_gradient(b, b.view(d_low), b.view(dropped), adapters.a);
    Some(d_low)
}

/// The gradient of a matrix, where it is trained.
fn weight_gradient(b: &mut Builder, d_y: View, x: View, param: Param) {
    let Some(d_w) = b.gradient(param) else { return };
    let (d_w, accumulate) = (b.view(d_w), b.accumulates(param));
    b.op(OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate });
}

fn input_gradient(b: &mut Builder, d_y: View, w: View, d_x: View, accumulate: bool, scale: f32) {
    b.op(OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, scale });
}

/// y = x w^T [+ bias] [+ add], without adapters.
pub(super) fn product(
    b: &mut Builder,
    x: View,
    linear: &Linear,
    bias: Option<Param>,
    add: Option<View>,
    y: View,
) {
    let bias = bias.map(|p| b.value(p));
    if let (Weight::Quantized(w), true) = (&linear.weight, x.rows <= FEW_ROWS) {
        let w = b.quantized_value(w);
        b.op(OpKind::LinearQuantized { x, w, bias, add, y });
        return;
    }
    let w = dense(b, linear);
    b.op(OpKind::Linear { x, w, bias, add, y, scale: 1.0 });
}

/// The matrix of a product (N, K), multiplied out where it is in four bits.
pub(super) fn dense(b: &mut Builder, linear: &Linear) -> View {
    let value = match &linear.weight {
        Weight::Dense(param) => b.value(*param),
        Weight::Quantized(w) => {
            let name = format!("{}.dequantized", linear.name);
            let out = b.matrix(name, w.rows, w.cols, b.recipe.precision);
            let w = b.quantized_value(w);
            b.op(OpKind::Dequantize { w, out });
            out
        }
    };
    b.view(value)
}

/// An adapter's input: x, with some of it dropped in training.
fn dropped(b: &mut Builder, x: TensorId, linear: &Linear, a: Param) -> TensorId {
    let probability = b.recipe.lora.as_ref().map_or(0.0, |l| l.dropout);
    if probability == 0.0 || !b.trains(a) {
        return x;
    }
    let cols = b.view(x).cols;
    let out = b.activation(format!("{}.dropped", linear.name), cols);
    dropout(b, x, out, a, false);
    out
}

fn dropout(b: &mut Builder, x: TensorId, out: TensorId, a: Param, accumulate: bool) {
    let probability = b.recipe.lora.as_ref().map_or(0.0, |l| l.dropout);
    let (step, stream) = (b.inputs.step, a.index as u32);
    b.op(OpKind::Dropout { x, out, step, probability, stream, accumulate });
}

/// Runs `f` with its ops marked as recomputation.
pub(super) fn recompute<T>(b: &mut Builder, f: impl FnOnce(&mut Builder) -> T) -> T {
    let phase = std::mem::replace(&mut b.phase, Phase::Recompute);
    let result = f(b);
    b.phase = phase;
    result
}
