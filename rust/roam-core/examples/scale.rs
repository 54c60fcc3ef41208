//! Plans one made-up training step and prints, as one JSON object, what it took:
//! `cargo run --release --example scale -- FAMILY OPERATORS`. `benches/scale.py` calls it for many sizes.
//!
//! The families: `deep`, a transformer of as many layers as it takes; `wide`, very many branches of one layer that are
//! added up; `branching`, a chain of cells of several unequal branches each. All have AdamW or momentum updates at the end.

#![expect(clippy::print_stdout, reason = "the figures are for a program to read")]

use roam_core::builder::GraphBuilder;
use roam_core::error::GraphError;
use roam_core::graph::{Graph, Kind, Operator, Phase, Residency, Tensor};
use roam_core::ids::TensorId;
use roam_core::optimize::{Control, optimize_timed};
use roam_core::plan::Settings;
use roam_core::synthetic::{Random, Transformer, transformer_step};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::fs::DirEntry;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [family, operators] = arguments.as_slice() else {
        return Err("usage: scale deep|wide|branching OPERATORS".into());
    };
    let operators: u64 = operators.parse()?;
    let begin = Instant::now();
    let graph = match family.as_str() {
        "deep" => deep(operators)?,
        "wide" => wide(operators)?,
        "branching" => branching(operators)?,
        other => return Err(format!("no family {other:?}: there are deep, wide and branching").into()),
    };
    let build_s = begin.elapsed().as_secs_f64();
    let (begin, cpu_begin) = (Instant::now(), cpu_s());
    let (plan, timings) = optimize_timed(&graph, &Settings::default(), &Control::default())?;
    let plan_s = begin.elapsed().as_secs_f64();
    let plan_cpu_s = cpu_s().zip(cpu_begin).map(|(end, begin)| end - begin);
    let stages: Map<String, Value> = timings.iter().map(|&(stage, seconds)| (stage.into(), seconds.into())).collect();
    let report = json!({
        "family": family,
        "operators": graph.operators().len(),
        "tensors": graph.tensors().len(),
        "build_s": build_s,
        "plan_s": plan_s,
        "plan_cpu_s": plan_cpu_s,
        "stages_s": stages,
        "peak_rss_bytes": peak_rss_bytes(),
        "gap": plan.gap(),
        "fragmentation": plan.fragmentation(),
        "graph_digest": graph.digest(),
    });
    println!("{report}");
    Ok(())
}

/// Seconds that the threads of this process have kept cores busy; `None` where the system does not tell.
fn cpu_s() -> Option<f64> {
    let busy_ns = |thread: std::io::Result<DirEntry>| -> Option<u64> {
        let status = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        status.split_whitespace().next()?.parse().ok()
    };
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    let busy_ns: Option<u64> = threads.map(busy_ns).sum();
    Some(busy_ns? as f64 / 1e9)
}

/// The most memory that this process has held; `None` where the system does not tell.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
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
