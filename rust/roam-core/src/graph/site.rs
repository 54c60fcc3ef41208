//! An operator as errors name it.

use super::entries::Operator;
use std::fmt;

/// An operator as an error names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The operator's name.
    pub name: String,
    /// Its place in program order.
    pub position: u32,
    /// The user's file; empty where unknown.
    pub file: String,
    /// The user's line; 0 where unknown.
    pub line: u32,
}

impl Site {
    /// The site of an operator.
    pub fn of(operator: &Operator) -> Box<Self> {
        Box::new(Self {
            name: operator.name.clone(),
            position: operator.position,
            file: operator.source.file.clone(),
            line: operator.source.line,
        })
    }

    /// `file:line`, or `file` where the line is unknown; `None` where both are.
    pub fn source(&self) -> Option<String> {
        match (self.file.as_str(), self.line) {
            ("", _) => None,
            (file, 0) => Some(file.to_owned()),
            (file, line) => Some(format!("{file}:{line}")),
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "operator `{}` at position {}", self.name, self.position)?;
        match self.source() {
            Some(source) => write!(out, " ({source})"),
            None => Ok(()),
        }
    }
}
