//! Long work on a thread of its own, while the calling thread serves Python: its signals, and a
//! progress callback.

use crate::guard::internal_error;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use rayon::ThreadPoolBuilder;
use roam_core::optimize::Control;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How often the calling thread looks for Ctrl-C.
const WAKE: Duration = Duration::from_millis(50);

/// What the work came to, and the Ctrl-C that cut it short, if one did: the best so far must then
/// be raised with it.
pub(crate) fn on_worker<T: Send + 'static>(
    py: Python<'_>,
    control: Control,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&Control) -> T + Send + 'static,
) -> PyResult<(Option<PyErr>, T)> {
    let (sender, stages) = mpsc::channel();
    let report = move |stage: &str, share_done: f64| {
        // Fails only when the calling thread has stopped listening; then there is no one to tell.
        let _ = sender.send((stage.to_owned(), share_done));
    };
    let control = Control { progress: Some(Box::new(report)), ..control };
    let (cancel, enough) = (control.cancel.clone(), control.enough.clone());
    let worker = thread::Builder::new().name("roam-worker".into()).spawn(move || {
        // Threads of its own: those of rayon's global pool do not survive a fork of the process.
        match ThreadPoolBuilder::new().build() {
            Ok(pool) => pool.install(|| work(&control)),
            Err(_) => work(&control),
        }
        // The channel closes here, or where a panic unwinds: `control` owns its only sender.
    })?;
    py.detach(|| {
        let listened = listen(stages, progress, &enough);
        if listened.is_err() {
            cancel.store(true, Ordering::Relaxed);
        }
        let result = worker.join();
        let interrupt = listened?;
        let result = result.map_err(|panic| Python::attach(|py| internal_error(py, &*panic)))?;
        Ok((interrupt, result))
    })
}

/// Until the planner is done: passes its stages on, and lets Python handle its signals. The first
/// Ctrl-C is `enough`, and returned in the end; at a second one, or at any other exception, nobody
/// waits for a plan.
fn listen(
    stages: Receiver<(String, f64)>,
    progress: Option<Py<PyAny>>,
    enough: &AtomicBool,
) -> PyResult<Option<PyErr>> {
    let mut interrupt = None;
    loop {
        let stage = match stages.recv_timeout(WAKE) {
            Ok(stage) => Some(stage),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Ok(interrupt),
        };
        Python::attach(|py| {
            let told = match (stage, &progress) {
                (Some(stage), Some(progress)) => progress.call1(py, stage).map(drop),
                _ => Ok(()),
            };
            match told.and_then(|()| py.check_signals()) {
                Err(error) if interrupt.is_none() && error.is_instance_of::<PyKeyboardInterrupt>(py) => {
                    enough.store(true, Ordering::Relaxed);
                    interrupt = Some(error);
                    Ok(())
                }
                handled => handled,
            }
        })?;
    }
}
