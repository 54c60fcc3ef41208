//! Reads problems in the contest's format (JSON, with or without gzip; google/iopddl).

use super::problem::{Edge, FORBIDDEN, Node, Problem};
use flate2::read::GzDecoder;
use serde::Deserialize;
use std::collections::HashMap;
use std::io::Read;

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1F, 0x8B];
/// The most bytes of JSON that are read. The contest's largest file has 139 MB.
const MOST_BYTES: u64 = 1 << 30;
/// The latest time that is accepted, because something is kept for each time.
const MOST_TIMES: i64 = 1 << 24;
/// All costs that are allowed sum up to less than this, so that no sum of theirs is taken for a
/// forbidden one.
const MOST_COST_IN_ALL: i128 = FORBIDDEN as i128;
/// The most that all bytes may sum up to, so that every sum is exact.
const MOST_BYTES_IN_ALL: i128 = 1_000_000_000_000_000_000;

/// Why a file is no problem of this kind.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be read.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Its text is not what the format says.
    #[error("not a problem in the contest's format: {0}")]
    Json(#[from] serde_json::Error),
    /// It is larger than what is read.
    #[error("the problem has more than {MOST_BYTES} bytes of text")]
    Size,
    /// Its numbers make no sense.
    #[error("{0}")]
    Value(String),
}

#[derive(Deserialize)]
struct File {
    problem: Text,
}

#[derive(Deserialize)]
struct Text {
    #[serde(default)]
    name: String,
    nodes: Nodes,
    edges: Edges,
    usage_limit: Option<i64>,
}

#[derive(Deserialize)]
struct Nodes {
    intervals: Vec<[i64; 2]>,
    costs: Vec<Vec<i64>>,
    usages: Vec<Vec<i64>>,
}

#[derive(Deserialize)]
struct Edges {
    nodes: Vec<Vec<usize>>,
    costs: Vec<Vec<i64>>,
}

impl Problem {
    /// Reads a problem.
    pub fn read(mut source: impl Read) -> Result<Problem, ReadError> {
        let mut begin = [0; 2];
        let mut text = Vec::new();
        let known = source.read(&mut begin)?;
        let source = begin[..known].chain(source);
        let count = if begin == GZIP {
            GzDecoder::new(source).take(MOST_BYTES + 1).read_to_end(&mut text)?
        } else {
            source.take(MOST_BYTES + 1).read_to_end(&mut text)?
        };
        if count as u64 > MOST_BYTES {
            return Err(ReadError::Size);
        }
        of_text(serde_json::from_slice::<File>(&text)?.problem)
    }
}

fn wrong<T>(message: String) -> Result<T, ReadError> {
    Err(ReadError::Value(message))
}

/// The largest of the costs that are allowed, whatever its sign.
fn largest(costs: &[i64]) -> i128 {
    costs.iter().filter(|&&cost| cost < FORBIDDEN).map(|&cost| i128::from(cost).abs()).max().unwrap_or(0)
}

fn of_text(text: Text) -> Result<Problem, ReadError> {
    let Text { name, nodes, edges, usage_limit } = text;
    let count = nodes.intervals.len();
    if nodes.costs.len() != count || nodes.usages.len() != count {
        return wrong(format!(
            "{count} nodes have {} lists of costs and {} of usages",
            nodes.costs.len(),
            nodes.usages.len()
        ));
    }
    if usage_limit.is_some_and(|limit| limit < 0) {
        return wrong("the usage limit is negative".into());
    }
    let (mut cost_in_all, mut bytes_in_all) = (0, 0);
    let mut problem = Problem { name, limit_bytes: usage_limit, ..Problem::default() };
    for (number, ((interval, costs), bytes)) in
        nodes.intervals.into_iter().zip(nodes.costs).zip(nodes.usages).enumerate()
    {
        if costs.is_empty() || costs.len() != bytes.len() {
            return wrong(format!("node {number} has {} costs and {} usages", costs.len(), bytes.len()));
        }
        if bytes.iter().any(|&bytes| bytes < 0) {
            return wrong(format!("node {number} has a usage below 0"));
        }
        cost_in_all += largest(&costs);
        bytes_in_all += bytes.iter().copied().max().map_or(0, i128::from);
        let [start, end] = interval;
        if !(0..=MOST_TIMES).contains(&start) || end > MOST_TIMES {
            return wrong(format!("node {number} is alive from {start} to {end}, which is out of range"));
        }
        // An interval that ends before it begins is empty.
        problem.nodes.push(Node { costs, bytes, lifetime: start as usize..end.max(start) as usize });
    }
    if edges.nodes.len() != edges.costs.len() {
        return wrong(format!("{} edges have {} cost matrices", edges.nodes.len(), edges.costs.len()));
    }
    let mut known: HashMap<Vec<i64>, usize> = HashMap::new();
    for (number, (ends, costs)) in edges.nodes.into_iter().zip(edges.costs).enumerate() {
        let &[first, second] = ends.as_slice() else {
            return wrong(format!("edge {number} has {} nodes; only pairs are read", ends.len()));
        };
        if first.max(second) >= count {
            return wrong(format!("edge {number} has the node {}, and there are {count}", first.max(second)));
        }
        let (rows, columns) = (problem.nodes[first].costs.len(), problem.nodes[second].costs.len());
        if costs.len() != rows * columns {
            return wrong(format!("edge {number} has {} costs for {rows} times {columns} strategies", costs.len()));
        }
        cost_in_all += largest(&costs);
        if first == second {
            let node = &mut problem.nodes[first];
            for (strategy, cost) in node.costs.iter_mut().enumerate() {
                let own = costs[strategy * columns + strategy];
                // No sum of allowed costs is too large for the type: see MOST_COST_IN_ALL.
                *cost = if (*cost).max(own) >= FORBIDDEN { FORBIDDEN } else { cost.saturating_add(own) };
            }
            continue;
        }
        let matrices = &mut problem.matrices;
        let matrix = *known.entry(costs).or_insert_with_key(|costs| {
            matrices.push(costs.clone());
            matrices.len() - 1
        });
        problem.edges.push(Edge { nodes: [first, second], matrix });
    }
    if cost_in_all >= MOST_COST_IN_ALL || bytes_in_all > MOST_BYTES_IN_ALL {
        return wrong("the costs or the usages are too large to be summed".into());
    }
    Ok(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    const PAIR: &str = r#"{"problem": {"name": "pair",
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [3]], "usages": [[5, 6], [7]]},
        "edges": {"nodes": [[0, 1], [0, 0]], "costs": [[10, 20], [100, 0, 0, 200]]}, "usage_limit": 12}}"#;

    #[test]
    fn a_problem_is_read_with_and_without_gzip() {
        let problem = Problem::read(PAIR.as_bytes()).unwrap();
        assert_eq!(problem.cost(&[0, 0]), Some(1 + 3 + 10 + 100));
        assert_eq!(problem.cost(&[1, 0]), Some(2 + 3 + 20 + 200));
        assert_eq!((problem.peak_bytes(&[0, 0]), problem.peak_bytes(&[1, 0])), (12, 13));
        assert!(problem.is_within(&[0, 0]) && !problem.is_within(&[1, 0]));
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(PAIR.as_bytes()).unwrap();
        assert_eq!(Problem::read(packed.finish().unwrap().as_slice()).unwrap(), problem);
    }

    #[test]
    fn what_an_edge_from_a_node_to_itself_forbids_stays_forbidden() {
        let text = PAIR
            .replace("[[1, 2], [3]]", "[[-5, 100000000000000000], [3]]")
            .replace("[100, 0, 0, 200]", "[100000000000000000, 0, 0, -200]");
        let problem = Problem::read(text.as_bytes()).unwrap();
        assert_eq!((problem.cost(&[0, 0]), problem.cost(&[1, 0])), (None, None));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (from, to) in [
            ("[[1, 2], [3]]", "[[1, 2], []]"),
            ("[[5, 6], [7]]", "[[5, 6]]"),
            ("[[5, 6], [7]]", "[[5, -6], [7]]"),
            ("[[0, 2], [1, 3]]", "[[0, 2], [-1, 3]]"),
            ("[[0, 2], [1, 3]]", "[[0, 2], [1, 99999999999]]"),
            ("[[0, 1], [0, 0]]", "[[0, 2], [0, 0]]"),
            ("[[0, 1], [0, 0]]", "[[0, 1, 1], [0, 0]]"),
            ("[10, 20]", "[10]"),
            ("[10, 20]", "[10, -9000000000000000000]"),
            ("[10, 20]", "[99999999999999999, 20]"),
            ("[[5, 6], [7]]", "[[5, 6], [9000000000000000000]]"),
            ("12}}", "-12}}"),
            ("\"edges\"", "\"edgy\""),
        ] {
            assert!(PAIR.contains(from), "{from}");
            assert!(Problem::read(PAIR.replace(from, to).as_bytes()).is_err(), "{to}");
        }
        assert!(Problem::read(&PAIR.as_bytes()[..40]).is_err());
    }
}
