//! Packs the layout instances of `benches/layout` and made-up ones, and prints what comes out:
//! `cargo run --release --example pack`, or with styles and counts, as in `-- wide 20000 60000 seed=2`.

use roam_core::layout::{Buffer, pack, read_csv};
use roam_core::optimize::Control;
use roam_core::synthetic::buffers::Style;
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Comparisons, unless given as in `work=1000000`; at the deadline, in seconds as in `limit=10`, the best packing so far counts.
const WORK: u64 = 20_000_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{:16} {:>8} {:>14} {:>16} {:>16} {:>9} {:>8} {:>9}  method",
        "instance", "buffers", "pairs", "bound", "pool", "gap", "seconds", "peak MiB"
    )?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut styles: Vec<Style> =
        Style::ALL.into_iter().filter(|style| arguments.iter().any(|name| name == style.name())).collect();
    let mut counts: Vec<u32> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    let setting = |name| arguments.iter().find_map(|argument| argument.strip_prefix(name)?.parse().ok());
    let limit = Duration::from_secs(setting("limit=").unwrap_or(60));
    let work = setting("work=").unwrap_or(WORK);
    let seed = setting("seed=").unwrap_or(1);
    if arguments.is_empty() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/layout");
        let mut paths: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
        paths.sort_by_key(std::fs::DirEntry::path);
        for path in paths.into_iter().map(|entry| entry.path()) {
            if path.extension().is_some_and(|extension| extension == "csv") {
                let (_, buffers) = read_csv(&std::fs::read_to_string(&path)?)?;
                row(&mut out, &path.file_stem().unwrap_or_default().to_string_lossy(), &buffers, work, limit)?;
            }
        }
    }
    if styles.is_empty() {
        styles = Style::ALL.to_vec();
    }
    if counts.is_empty() {
        counts = vec![1000, 20_000, 60_000];
    }
    for count in counts {
        for style in &styles {
            row(&mut out, style.name(), &style.buffers(count, seed), work, limit)?;
        }
    }
    Ok(())
}

fn row(out: &mut impl Write, name: &str, buffers: &[Buffer], work: u64, limit: Duration) -> Result<(), Box<dyn Error>> {
    reset_peak_memory();
    let begin = Instant::now();
    let control = Control { deadline: begin.checked_add(limit), ..Control::default() };
    let packing = pack(buffers, work, &control)?;
    let seconds = begin.elapsed().as_secs_f64();
    let gap = packing.pool_bytes as f64 / packing.live_bytes as f64 - 1.0;
    writeln!(
        out,
        "{name:16} {:8} {:14} {:16} {:16} {:8.3}% {seconds:8.2} {:>9}  {}",
        buffers.len(),
        pairs(buffers),
        packing.live_bytes,
        packing.pool_bytes,
        100.0 * gap,
        peak_memory_mib().map_or("-".into(), |mib| mib.to_string()),
        packing.method,
    )?;
    Ok(())
}

/// How many pairs of buffers are needed at a common time.
fn pairs(buffers: &[Buffer]) -> u64 {
    let mut lowers: Vec<u64> = buffers.iter().map(|buffer| buffer.lower).collect();
    let mut uppers: Vec<u64> = buffers.iter().map(|buffer| buffer.upper).collect();
    lowers.sort_unstable();
    uppers.sort_unstable();
    let begun_before = |at: usize| uppers.partition_point(|&upper| upper <= lowers[at]);
    (0..lowers.len()).map(|at| (at - begun_before(at)) as u64).sum()
}

/// Makes the system forget the peak so far, where it can (Linux).
fn reset_peak_memory() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most memory that was resident since the reset, where the system tells (Linux).
fn peak_memory_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024)
}
