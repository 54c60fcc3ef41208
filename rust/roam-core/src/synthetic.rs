//! Made-up training steps, the same on every machine: for tests and benchmarks.

pub mod buffers;
pub mod steps;

use crate::graph::{
    Graph, GraphBuilder, GraphError, Kind, Operator, OperatorId, Phase, Residency, ReusePair, Source, Tensor, TensorId,
};

/// The shape of a decoder-only transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transformer {
    /// Blocks of attention and perceptron.
    pub layers: u64,
    /// Width of the residual stream.
    pub width: u64,
    /// Tokens in the batch.
    pub tokens: u64,
    /// Size of the vocabulary.
    pub vocabulary: u64,
}

impl Transformer {
    /// As GPT-2 XL at 1024 tokens.
    pub const XL: Transformer = Transformer { layers: 48, width: 1600, tokens: 1024, vocabulary: 50257 };
}

/// A steady training step of a transformer in 32-bit floats: forward, loss, backward, and an AdamW
/// update of some 17 operators per parameter at the end.
///
/// # Errors
/// [`GraphError`] where the shape is so large that sizes overflow.
pub fn transformer_step(shape: Transformer) -> Result<Graph, GraphError> {
    let mut tape = Tape {
        builder: GraphBuilder::new(format!("transformer-{}x{}", shape.layers, shape.width), "cpu", 64),
        phase: Phase::Forward,
        module: String::new(),
        local_sizes: Vec::new(),
    };
    let Transformer { layers, width, tokens, vocabulary } = shape;
    let stream = 4 * tokens * width;
    let mut gradients: Vec<(TensorId, TensorId, u64)> = Vec::new();

    let embedding = tape.parameter("embedding", 4 * vocabulary * width)?;
    let ids = tape.tensor("ids", 8 * tokens, Kind::Input, Residency::Enters)?;
    let mut residual = tape.call("embedding", &[embedding, ids], stream, true)?;
    let mut blocks = Vec::new();
    for layer in 0..layers {
        tape.module = format!("blocks.{layer}");
        let mut linears = Vec::new();
        let mut block = |tape: &mut Tape, residual: TensorId, inner: u64, outer: u64, is_attention: bool| {
            let norm = tape.parameter("norm.weight", 4 * width)?;
            let normed = tape.call("native_layer_norm", &[residual, norm], stream, true)?;
            let first = tape.parameter("first.weight", 4 * width * inner)?;
            let first_bias = tape.parameter("first.bias", 4 * inner)?;
            let hidden = tape.call("addmm", &[normed, first, first_bias], 4 * tokens * inner, true)?;
            let (activated, saved) = if is_attention {
                let log_sums =
                    tape.tensor("log_sums", 4 * tokens * width / 64, Kind::Activation, Residency::StepLocal)?;
                let out = tape.tensor("attended", stream, Kind::Activation, Residency::StepLocal)?;
                tape.operator("attention", &[hidden], &[out, log_sums], &[], 4 * tokens * 64, &[])?;
                (out, vec![out, log_sums])
            } else {
                let cubed = tape.pointwise("pow", &[hidden], 4 * tokens * inner)?;
                let sum = tape.pointwise("add", &[cubed, hidden], 4 * tokens * inner)?;
                let tanh = tape.pointwise("tanh", &[sum], 4 * tokens * inner)?;
                (tape.pointwise("mul", &[tanh, hidden], 4 * tokens * inner)?, vec![tanh])
            };
            let second = tape.parameter("second.weight", 4 * outer * width)?;
            let second_bias = tape.parameter("second.bias", 4 * width)?;
            let output = tape.call("addmm", &[activated, second, second_bias], stream, true)?;
            let sum = tape.pointwise("add", &[residual, output], stream)?;
            linears.push(Half {
                residual,
                norm,
                normed,
                first,
                first_bias,
                hidden,
                activated,
                saved,
                second,
                second_bias,
                inner,
                outer,
            });
            Ok::<TensorId, GraphError>(sum)
        };
        residual = block(&mut tape, residual, 3 * width, width, true)?;
        residual = block(&mut tape, residual, 4 * width, 4 * width, false)?;
        blocks.push(linears);
    }
    tape.module = "head".into();
    let logits_bytes = 4 * tokens * vocabulary;
    let logits = tape.call("mm", &[residual, embedding], logits_bytes, true)?;
    tape.phase = Phase::Loss;
    let log_softmax = tape.pointwise("log_softmax", &[logits], logits_bytes)?;
    let loss = tape.tensor("loss", 4, Kind::Output, Residency::Leaves)?;
    tape.operator("nll_loss", &[log_softmax, ids], &[loss], &[], 0, &[])?;

    tape.phase = Phase::Backward;
    let back = tape.call("nll_loss_backward", &[log_softmax, ids], logits_bytes, false)?;
    let back = tape.pointwise("log_softmax_backward", &[back, log_softmax], logits_bytes)?;
    let mut gradient = tape.call("mm", &[back, embedding], stream, false)?;
    let tied = tape.gradient("mm", &[back, residual], 4 * vocabulary * width)?;
    for (layer, linears) in blocks.iter().enumerate().rev() {
        tape.module = format!("blocks.{layer}");
        for half in linears.iter().rev() {
            let before = gradient;
            let activated = tape.call("mm", &[gradient, half.second], 4 * tokens * half.outer, false)?;
            let weight = tape.gradient("mm", &[gradient, half.activated], 4 * half.outer * width)?;
            gradients.push((half.second, weight, 4 * half.outer * width));
            let bias = tape.gradient("sum", &[gradient], 4 * width)?;
            gradients.push((half.second_bias, bias, 4 * width));
            let mut inputs = vec![activated, half.hidden];
            inputs.extend(&half.saved);
            let hidden = if half.inner == half.outer {
                tape.pointwise("gelu_backward", &inputs, 4 * tokens * half.inner)?
            } else {
                tape.call("attention_backward", &inputs, 4 * tokens * half.inner, false)?
            };
            let normed = tape.call("mm", &[hidden, half.first], stream, false)?;
            let weight = tape.gradient("mm", &[hidden, half.normed], 4 * width * half.inner)?;
            gradients.push((half.first, weight, 4 * width * half.inner));
            let bias = tape.gradient("sum", &[hidden], 4 * half.inner)?;
            gradients.push((half.first_bias, bias, 4 * half.inner));
            let through = tape.tensor("through", stream, Kind::Temporary, Residency::StepLocal)?;
            let weight = tape.tensor("norm.gradient", 4 * width, Kind::Gradient, Residency::StepLocal)?;
            tape.operator(
                "native_layer_norm_backward",
                &[normed, half.residual, half.norm],
                &[through, weight],
                &[],
                0,
                &[],
            )?;
            gradients.push((half.norm, weight, 4 * width));
            gradient = tape.pointwise("add", &[before, through], stream)?;
        }
    }
    let scattered = tape.gradient("embedding_backward", &[gradient, ids], 4 * vocabulary * width)?;
    let tied = tape.pointwise("add", &[tied, scattered], 4 * vocabulary * width)?;
    gradients.push((embedding, tied, 4 * vocabulary * width));

    tape.phase = Phase::Update;
    for &(parameter, gradient, bytes) in gradients.iter().rev() {
        tape.adamw(parameter, gradient, bytes)?;
    }
    tape.builder.build()
}

/// What the backward pass needs of one half of a block.
struct Half {
    residual: TensorId,
    norm: TensorId,
    normed: TensorId,
    first: TensorId,
    first_bias: TensorId,
    hidden: TensorId,
    activated: TensorId,
    saved: Vec<TensorId>,
    second: TensorId,
    second_bias: TensorId,
    inner: u64,
    outer: u64,
}

/// Records operators one after another.
struct Tape {
    builder: GraphBuilder,
    phase: Phase,
    module: String,
    /// Bytes per tensor id; `None` where it is not step-local.
    local_sizes: Vec<Option<u64>>,
}

impl Tape {
    fn tensor(
        &mut self,
        name: &str,
        size_bytes: u64,
        kind: Kind,
        residency: Residency,
    ) -> Result<TensorId, GraphError> {
        let name = format!("{}.{name}.{}", self.module, self.builder.num_tensors());
        self.local_sizes.push((residency == Residency::StepLocal).then_some(size_bytes));
        self.builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 })
    }

    fn parameter(&mut self, name: &str, size_bytes: u64) -> Result<TensorId, GraphError> {
        self.tensor(name, size_bytes, Kind::Parameter, Residency::Persistent)
    }

    fn operator(
        &mut self,
        name: &str,
        reads: &[TensorId],
        creates: &[TensorId],
        mutates: &[TensorId],
        workspace_bytes: u64,
        reuse: &[ReusePair],
    ) -> Result<(), GraphError> {
        self.builder.operator(Operator {
            reads: reads.to_vec(),
            creates: creates.to_vec(),
            mutates: mutates.to_vec(),
            workspace_bytes,
            reuse: reuse.to_vec(),
            source: Source { module: self.module.clone(), file: String::new(), line: 0 },
            ..Operator::new(name, self.builder.num_operators() as u32, self.phase)
        })?;
        Ok(())
    }

    /// An operator that only looks at its inputs in another way (a view, a number read from the
    /// device): it makes no tensor, and the next operator must come after it.
    fn view(&mut self, name: &str, reads: &[TensorId]) -> Result<(), GraphError> {
        let id = OperatorId(self.builder.num_operators() as u32);
        self.operator(name, reads, &[], &[], 0, &[])?;
        self.builder.control(id, OperatorId(id.0 + 1));
        Ok(())
    }

    fn call(&mut self, name: &str, reads: &[TensorId], bytes: u64, kept: bool) -> Result<TensorId, GraphError> {
        let kind = if kept { Kind::Activation } else { Kind::Temporary };
        let output = self.tensor(name, bytes, kind, Residency::StepLocal)?;
        if name.ends_with("mm") {
            self.view("t", &reads[1..2])?;
        }
        self.operator(name, reads, &[output], &[], 0, &[])?;
        Ok(output)
    }

    fn gradient(&mut self, name: &str, reads: &[TensorId], bytes: u64) -> Result<TensorId, GraphError> {
        let output = self.tensor("gradient", bytes, Kind::Gradient, Residency::StepLocal)?;
        if name == "mm" {
            self.view("t", &reads[..1])?;
        }
        self.operator(name, reads, &[output], &[], 0, &[])?;
        Ok(output)
    }

    /// An output that may take the memory of any input of its size.
    fn pointwise(&mut self, name: &str, reads: &[TensorId], bytes: u64) -> Result<TensorId, GraphError> {
        let output = self.tensor(name, bytes, Kind::Temporary, Residency::StepLocal)?;
        let reuse: Vec<ReusePair> = reads
            .iter()
            .filter(|input| self.local_sizes[input.index()] == Some(bytes))
            .map(|&input| ReusePair { input, output })
            .collect();
        self.operator(name, reads, &[output], &[], 0, &reuse)?;
        Ok(output)
    }

    /// The single-tensor AdamW of PyTorch, bias corrections included.
    fn adamw(&mut self, parameter: TensorId, gradient: TensorId, bytes: u64) -> Result<(), GraphError> {
        let first = self.tensor("exp_avg", bytes, Kind::OptimizerState, Residency::Persistent)?;
        let second = self.tensor("exp_avg_sq", bytes, Kind::OptimizerState, Residency::Persistent)?;
        let step = self.tensor("step", 4, Kind::OptimizerState, Residency::Persistent)?;
        self.operator("add_", &[], &[], &[step], 0, &[])?;
        self.operator("mul_", &[], &[], &[parameter], 0, &[])?;
        self.operator("lerp_", &[gradient], &[], &[first], 0, &[])?;
        self.operator("mul_", &[], &[], &[second], 0, &[])?;
        self.operator("addcmul_", &[gradient], &[], &[second], 0, &[])?;
        let root = self.call("sqrt", &[second], bytes, false)?;
        // The bias corrections are arithmetic on the host.
        self.view("item", &[step])?;
        for name in ["pow", "sub", "pow", "sub", "sqrt", "div"] {
            self.view(name, &[])?;
        }
        let scaled = self.pointwise("div", &[root], bytes)?;
        self.operator("add_", &[], &[], &[scaled], 0, &[])?;
        self.operator("addcdiv_", &[first, scaled], &[], &[parameter], 0, &[])
    }
}
