//! Which module may need which: what docs/architecture.md states, read from the `use` statements
//! and paths of the sources.
//!
//! A module at the top needs only modules of rows above its own. Within a folder no file needs
//! another that needs it, however far round. A folder's `mod.rs` only lists what it has, so it
//! counts as nothing by itself: who names an entry of it needs the file that the entry comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Edges = BTreeMap<String, BTreeSet<String>>;

/// Parts of a path, from the crate's root: `["layout", "search", "beam"]`.
type Module = Vec<String>;

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The text without comments, without what strings hold, and without what is for tests alone.
fn code(text: &str) -> String {
    let text = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let text = text.split("\n#[cfg(test)]\npub(super) mod tests").next().unwrap_or_default();
    let mut code = String::new();
    for line in text.lines() {
        // No string of the sources holds two slashes or names a path of the crate.
        code.push_str(line.split("//").next().unwrap_or_default());
        code.push('\n');
    }
    code
}

/// Every path that the code names from the crate's root or from a parent, as it stands there:
/// `crate::layout::blocks::Blocks`. Groups are taken apart.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            expand(&code[at..], &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Reads one path with its groups; returns what is left of the text.
fn expand<'a>(text: &'a str, above: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> &'a str {
    let depth = above.len();
    let mut text = text.trim_start();
    loop {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        if !name.is_empty() {
            above.push(name.to_owned());
        }
        text = rest;
        let Some(rest) = text.strip_prefix("::") else { break };
        text = rest.trim_start();
        let Some(group) = text.strip_prefix('{') else { continue };
        text = group;
        loop {
            text = expand(text, above, found).trim_start();
            match text.strip_prefix(',') {
                Some(rest) => text = rest.trim_start(),
                None => break,
            }
            if text.starts_with('}') {
                break;
            }
        }
        text = text.strip_prefix('}').unwrap_or(text);
        above.truncate(depth);
        return text;
    }
    found.push(above.iter().filter(|name| *name != "self").cloned().collect());
    above.truncate(depth);
    let text = text.trim_start();
    // `a as b`
    match text.strip_prefix("as ") {
        Some(rest) => rest.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || c == '_'),
        None => text,
    }
}

/// The crate's files by module, and per folder from where each re-exported name comes.
struct Crate {
    code: BTreeMap<Module, String>,
    folders: BTreeMap<Module, BTreeMap<String, Vec<String>>>,
}

impl Crate {
    fn read(root: &Path) -> Self {
        let mut found = Vec::new();
        files(root, &mut found);
        let mut read = Crate { code: BTreeMap::new(), folders: BTreeMap::new() };
        for path in found {
            let inside = path.strip_prefix(root).expect("below the root").with_extension("");
            let mut module: Module = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            let text = code(&fs::read_to_string(&path).expect("text"));
            match module.last().map(String::as_str) {
                Some("lib") => {}
                Some("mod") => {
                    module.pop();
                    let mut exports = BTreeMap::new();
                    for (at, _) in text.match_indices("use ") {
                        let mut paths = Vec::new();
                        expand(&text[at + 4..], &mut Vec::new(), &mut paths);
                        for path in paths {
                            exports.insert(path.last().expect("a name").clone(), path);
                        }
                    }
                    read.folders.insert(module, exports);
                }
                _ => {
                    read.code.insert(module, text);
                }
            }
        }
        read
    }

    /// The file or folder that the path leads to.
    fn resolve(&self, from: &[String], path: &[String]) -> Option<Module> {
        let mut at: Module = Vec::new();
        let mut rest = path;
        if path[0] == "super" {
            at = from.to_vec();
            while rest.first().is_some_and(|name| name == "super") {
                at.pop();
                rest = &rest[1..];
            }
        } else {
            rest = &rest[1..];
        }
        loop {
            if self.code.contains_key(&at) {
                return Some(at);
            }
            let Some((name, after)) = rest.split_first() else { break };
            let below: Module = at.iter().chain([name]).cloned().collect();
            if self.code.contains_key(&below) || self.folders.contains_key(&below) {
                at = below;
                rest = after;
            } else {
                let exports = self.folders.get(&at)?;
                let origin = exports.get(name).or_else(|| exports.get("*"));
                return match origin {
                    Some(origin) => {
                        let inside: Vec<String> =
                            ["crate".to_owned()].into_iter().chain(at.clone()).chain(origin.clone()).collect();
                        self.resolve(from, &inside)
                    }
                    None => Some(at),
                };
            }
        }
        (!at.is_empty()).then_some(at)
    }

    /// What every file needs.
    fn needs(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let of = |module: &Module, code: &str| {
            let found = paths(code).into_iter().filter_map(|path| self.resolve(module, &path));
            found.filter(|other| other != module).collect()
        };
        self.code.iter().map(|(module, code)| (module, of(module, code))).collect()
    }

    /// The same between what lies in one folder.
    fn within(&self, folder: &[String]) -> Edges {
        let mut edges = Edges::new();
        for (module, needs) in self.needs() {
            let Some(entry) = module.strip_prefix(folder).and_then(<[String]>::first) else { continue };
            let inner = needs.iter().filter_map(|other| other.strip_prefix(folder).and_then(<[String]>::first));
            edges.entry(entry.clone()).or_default().extend(inner.filter(|other| *other != entry).cloned());
        }
        edges
    }
}

/// Modules that need each other, in the order of the needing.
fn circle(edges: &Edges) -> Option<Vec<String>> {
    fn walk<'a>(
        at: &'a str,
        edges: &'a Edges,
        way: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<String>> {
        if let Some(begin) = way.iter().position(|&other| other == at) {
            return Some(way[begin..].iter().map(|&name| name.to_owned()).collect());
        }
        if !done.insert(at) {
            return None;
        }
        way.push(at);
        let found = edges.get(at).into_iter().flatten().find_map(|next| walk(next, edges, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    edges.keys().find_map(|at| walk(at, edges, &mut Vec::new(), &mut done))
}

/// The rows of docs/architecture.md: the lowest modules first.
fn rows() -> Vec<Vec<String>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/architecture.md");
    let text = fs::read_to_string(page).expect("the page");
    let list = text
        .split("<!-- rows of roam-core -->")
        .nth(1)
        .expect("the list")
        .split("<!-- end of rows -->")
        .next()
        .unwrap_or_default();
    let row = |line: &str| line.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    list.lines().map(row).filter(|row| !row.is_empty()).collect()
}

/// What needs a module that is not in a row above its own.
fn upward(edges: &Edges, rows: &[Vec<String>]) -> Vec<String> {
    let row = |name: &str| rows.iter().position(|row| row.iter().any(|other| other == name));
    let mut found = Vec::new();
    for (module, needs) in edges {
        let Some(own) = row(module) else {
            found.push(format!("`{module}` is in no row"));
            continue;
        };
        let wrong = needs.iter().filter(|other| row(other).is_none_or(|above| above >= own));
        found.extend(wrong.map(|other| format!("`{module}` needs `{other}`")));
    }
    let known = rows.iter().flatten().filter(|name| !edges.contains_key(*name));
    found.extend(known.map(|name| format!("there is no module `{name}`")));
    found
}

#[test]
fn modules_need_only_those_of_rows_above() {
    let edges = Crate::read(&sources()).within(&[]);
    assert!(edges.values().flatten().count() > 50, "next to nothing was read: {edges:?}");
    assert_eq!(upward(&edges, &rows()), [""; 0], "docs/architecture.md states the rows");
}

#[test]
fn bindings_import_nothing_of_the_package_but_errors_and_the_solver() {
    let mut found = Vec::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../roam-py/src"), &mut found);
    let texts = found.iter().map(|path| fs::read_to_string(path).expect("text"));
    let imported = |text: String| {
        text.split("import(\"roam")
            .skip(1)
            .map(|rest| rest[..rest.find('"').unwrap_or(0)].to_owned())
            .collect::<Vec<_>>()
    };
    let imported: BTreeSet<String> = texts.flat_map(imported).collect();
    assert_eq!(imported.into_iter().collect::<Vec<_>>(), [".errors", ".exact"]);
}

#[test]
fn no_files_of_a_folder_need_each_other() {
    let read = Crate::read(&sources());
    for folder in read.folders.keys() {
        let edges = read.within(folder);
        assert_eq!(circle(&edges), None, "in {}", folder.join("/"));
    }
    assert!(read.folders.len() > 10);
}

#[test]
fn a_folder_only_lists_what_it_has() {
    let mut found = Vec::new();
    files(&sources(), &mut found);
    for path in found.iter().filter(|path| path.ends_with("mod.rs")) {
        let text = code(&fs::read_to_string(path).expect("text"));
        for statement in text.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            let inside = statement
                .trim_start_matches("#[cfg(test)]")
                .trim_start()
                .trim_start_matches("pub(crate)")
                .trim_start_matches("pub(super)")
                .trim_start_matches("pub")
                .trim_start();
            let lists = inside.starts_with("mod ") || inside.starts_with("use ");
            assert!(lists && !inside.contains("mod tests {"), "{}: {statement}", path.display());
        }
    }
}

/// A crate of the files given.
fn planted(name: &str, given: &[(&str, &str)]) -> Crate {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&root);
    for (path, text) in given {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    }
    Crate::read(&root)
}

fn edges_of(pairs: &[(&str, &[&str])]) -> Edges {
    let owned = |needs: &[&str]| needs.iter().map(|&need| need.to_owned()).collect();
    pairs.iter().map(|&(name, needs)| (name.to_owned(), owned(needs))).collect()
}

#[test]
fn a_planted_circle_is_found() {
    let read = planted(
        "circle",
        &[
            ("lib.rs", "mod low; mod high;"),
            ("low.rs", "//! use crate::nothing;\nuse crate::high::{self, one::{One, Other}};\n"),
            ("high/mod.rs", "mod one;\nmod two;\npub(crate) use one::{One, Two as Three};\n"),
            (
                "high/one.rs",
                "use super::two::{\n    Two,\n};\nfn f() { crate::low::f() }\n#[cfg(test)]\nmod tests { use crate::never::N; }",
            ),
            ("high/two.rs", "use std::fmt;\nuse super::One;\n"),
        ],
    );
    assert_eq!(read.within(&[]), edges_of(&[("high", &["low"]), ("low", &["high"])]));
    assert_eq!(circle(&read.within(&[])), Some(vec!["high".to_owned(), "low".to_owned()]));
    let high = read.within(&["high".to_owned()]);
    assert_eq!(high, edges_of(&[("one", &["two"]), ("two", &["one"])]));
    assert!(circle(&high).is_some());
}

#[test]
fn a_need_against_the_rows_is_found() {
    let edges = edges_of(&[("a", &[]), ("b", &["a"]), ("c", &["b", "a"]), ("d", &["b"])]);
    let row = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(upward(&edges, &[row(&["a"]), row(&["b"]), row(&["c", "d"])]), [""; 0]);
    assert_eq!(upward(&edges, &[row(&["a"]), row(&["c", "b"]), row(&["d"])]), ["`c` needs `b`"]);
    assert_eq!(
        upward(&edges, &[row(&["a"]), row(&["b"]), row(&["c", "x"])]),
        ["`d` is in no row", "there is no module `x`"]
    );
    assert_eq!(circle(&edges), None);
}
