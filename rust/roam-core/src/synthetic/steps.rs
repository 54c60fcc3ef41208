//! Made-up training steps of any size, and graphs of operators that are no training step, in
//! families.

use super::{Transformer, transformer_step};
use crate::graph::{Graph, GraphBuilder, GraphError, Kind, Operator, Phase, Residency, Tensor, TensorId};
use crate::rng::Random;

/// What a made-up graph looks like. The first three are training steps with updates at the end,
/// with AdamW in the first and with momentum in the others; the rest are operators without phases,
/// shaped as no trunk or layer helps the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// A transformer of as many layers as it takes.
    Deep,
    /// Very many branches of one layer that are added up.
    Wide,
    /// A chain of cells of several unequal branches each.
    Branching,
    /// Chains of 100 operators from one input, all of which meet in the last operator.
    Parallel,
    /// Operators that each read two results from anywhere before them.
    Linked,
    /// Operators that each read up to three of the last 64 results.
    Window,
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 6] =
        [Family::Deep, Family::Wide, Family::Branching, Family::Parallel, Family::Linked, Family::Window];

    /// The name in lists.
    pub fn name(self) -> &'static str {
        match self {
            Family::Deep => "deep",
            Family::Wide => "wide",
            Family::Branching => "branching",
            Family::Parallel => "parallel",
            Family::Linked => "linked",
            Family::Window => "window",
        }
    }

    /// A step of about so many operators; the same every time.
    ///
    /// # Errors
    /// [`GraphError`] where sizes overflow, from some 10^9 operators on.
    pub fn step(self, operators: u64) -> Result<Graph, GraphError> {
        match self {
            Family::Deep => deep(operators),
            Family::Wide => wide(operators),
            Family::Branching => branching(operators),
            Family::Parallel => parallel(operators),
            Family::Linked => linked(operators),
            Family::Window => window(operators),
        }
    }
}

fn deep(operators: u64) -> Result<Graph, GraphError> {
    let step = |layers| transformer_step(Transformer { layers, width: 256, tokens: 128, vocabulary: 5000 });
    let [one, two] = [step(1)?.operators().len() as u64, step(2)?.operators().len() as u64];
    step((operators.saturating_sub(one) / (two - one)).max(1))
}

fn wide(operators: u64) -> Result<Graph, GraphError> {
    let mut random = Random::new(1);
    let mut net = Net::new("wide");
    let input = net.input(4096)?;
    let mut sum = net.layer(&[input], 4096, 0)?;
    while net.operators_in_all() < operators {
        let branch = net.layer(&[input], 64 * (1 + random.below(64)), 64 * (1 + random.below(4096)))?;
        sum = net.layer(&[sum, branch], 4096, 0)?;
    }
    net.train(sum)
}

fn branching(operators: u64) -> Result<Graph, GraphError> {
    let mut random = Random::new(2);
    let mut net = Net::new("branching");
    let mut trunk = net.input(65_536)?;
    while net.operators_in_all() < operators {
        let mut ends = Vec::new();
        for _ in 0..2 + random.below(5) {
            let mut end = trunk;
            for _ in 0..1 + random.below(4) {
                end = net.layer(&[end], 1024 * (1 + random.below(256)), 64 * (1 + random.below(1024)))?;
            }
            ends.push(end);
        }
        trunk = net.layer(&ends, 65_536, 0)?;
    }
    net.train(trunk)
}

/// Operators in each chain of [`Family::Parallel`].
const CHAIN: u64 = 100;
/// Results that an operator of [`Family::Window`] can read.
const REACH: u64 = 64;

fn parallel(operators: u64) -> Result<Graph, GraphError> {
    let mut random = Random::new(3);
    let mut net = Net::new("parallel");
    let input = net.input(65_536)?;
    let mut ends = Vec::new();
    for _ in 0..(operators / CHAIN).max(1) {
        let mut end = input;
        for at in 1..=CHAIN {
            // What waits for the end is small, as sums are.
            let most = if at == CHAIN { 64 } else { 4096 };
            end = net.layer(&[end], 64 * (1 + random.below(most)), 0)?;
        }
        ends.push(end);
    }
    net.layer(&ends, 65_536, 0)?;
    net.builder.build()
}

fn linked(operators: u64) -> Result<Graph, GraphError> {
    let mut random = Random::new(4);
    let mut net = Net::new("linked");
    let mut last = net.input(65_536)?;
    for _ in 0..operators {
        let inputs = [random.below(last as u64 + 1) as usize, random.below(last as u64 + 1) as usize];
        last = net.layer(&inputs[..if inputs[0] == inputs[1] { 1 } else { 2 }], 64 * (1 + random.below(4096)), 0)?;
    }
    net.builder.build()
}

fn window(operators: u64) -> Result<Graph, GraphError> {
    let mut random = Random::new(5);
    let mut net = Net::new("window");
    let mut last = net.input(65_536)?;
    for _ in 0..operators {
        let mut inputs: Vec<usize> =
            (0..=random.below(3)).map(|_| last - random.below(REACH.min(last as u64 + 1)) as usize).collect();
        inputs.sort_unstable();
        inputs.dedup();
        last = net.layer(&inputs, 64 * (1 + random.below(4096)), 0)?;
    }
    net.builder.build()
}

/// A forward pass of layers, from which the rest of the step follows.
struct Net {
    builder: GraphBuilder,
    layers: Vec<Layer>,
    operators_in_all: u64,
}

struct Layer {
    inputs: Vec<usize>,
    output: TensorId,
    bytes: u64,
    /// The weight and its bytes, where there is one.
    weight: Option<(TensorId, u64)>,
}

impl Net {
    fn new(name: &str) -> Self {
        Net { builder: GraphBuilder::new(name, "cpu", 64), layers: Vec::new(), operators_in_all: 1 }
    }

    /// How many operators the whole step has if no layer is added.
    fn operators_in_all(&self) -> u64 {
        self.operators_in_all
    }

    fn tensor(&mut self, size_bytes: u64, kind: Kind, residency: Residency) -> Result<TensorId, GraphError> {
        let name = format!("t{}", self.builder.num_tensors());
        self.builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 })
    }

    fn call(
        &mut self,
        phase: Phase,
        reads: &[TensorId],
        creates: &[TensorId],
        mutates: &[TensorId],
    ) -> Result<(), GraphError> {
        self.builder.operator(Operator {
            reads: reads.to_vec(),
            creates: creates.to_vec(),
            mutates: mutates.to_vec(),
            ..Operator::new("call", self.builder.num_operators() as u32, phase)
        })?;
        Ok(())
    }

    fn input(&mut self, bytes: u64) -> Result<usize, GraphError> {
        let output = self.tensor(bytes, Kind::Input, Residency::Enters)?;
        self.layers.push(Layer { inputs: Vec::new(), output, bytes, weight: None });
        Ok(self.layers.len() - 1)
    }

    /// A layer of the given inputs; without a weight where that has no bytes.
    fn layer(&mut self, inputs: &[usize], bytes: u64, weight_bytes: u64) -> Result<usize, GraphError> {
        let mut reads: Vec<TensorId> = inputs.iter().map(|&input| self.layers[input].output).collect();
        let mut weight = None;
        if weight_bytes > 0 {
            let parameter = self.tensor(weight_bytes, Kind::Parameter, Residency::Persistent)?;
            reads.push(parameter);
            weight = Some((parameter, weight_bytes));
        }
        let output = self.tensor(bytes, Kind::Activation, Residency::StepLocal)?;
        self.call(Phase::Forward, &reads, &[output], &[])?;
        // The gradients of the inputs and of the weight, and three operators that update it.
        self.operators_in_all += 1 + inputs.len() as u64 + if weight_bytes > 0 { 4 } else { 0 };
        self.layers.push(Layer { inputs: inputs.to_vec(), output, bytes, weight });
        Ok(self.layers.len() - 1)
    }

    /// Backward and update with momentum, of the last layer's output as the loss.
    fn train(mut self, last: usize) -> Result<Graph, GraphError> {
        let layers = std::mem::take(&mut self.layers);
        let mut gradients: Vec<Option<TensorId>> = vec![None; layers.len()];
        let seed = self.tensor(layers[last].bytes, Kind::Gradient, Residency::StepLocal)?;
        self.call(Phase::Loss, &[layers[last].output], &[seed], &[])?;
        gradients[last] = Some(seed);
        let mut updates = Vec::new();
        for at in (0..layers.len()).rev() {
            let Some(gradient) = gradients[at] else { continue };
            let Layer { inputs, output, weight, .. } = &layers[at];
            for &input in inputs {
                if layers[input].inputs.is_empty() {
                    continue;
                }
                if let Some(sum) = gradients[input] {
                    self.call(Phase::Backward, &[gradient, *output], &[], &[sum])?;
                } else {
                    let made = self.tensor(layers[input].bytes, Kind::Gradient, Residency::StepLocal)?;
                    self.call(Phase::Backward, &[gradient, *output], &[made], &[])?;
                    gradients[input] = Some(made);
                }
            }
            if let &Some((parameter, bytes)) = weight {
                let made = self.tensor(bytes, Kind::Gradient, Residency::StepLocal)?;
                let mut reads = vec![gradient];
                reads.extend(inputs.iter().map(|&input| layers[input].output));
                self.call(Phase::Backward, &reads, &[made], &[])?;
                updates.push((parameter, made, bytes));
            }
        }
        for (parameter, gradient, bytes) in updates {
            let momentum = self.tensor(bytes, Kind::OptimizerState, Residency::Persistent)?;
            self.call(Phase::Update, &[gradient], &[], &[momentum])?;
            let scaled = self.tensor(bytes, Kind::Temporary, Residency::StepLocal)?;
            self.call(Phase::Update, &[momentum], &[scaled], &[])?;
            self.call(Phase::Update, &[scaled], &[], &[parameter])?;
        }
        self.builder.build()
    }
}
