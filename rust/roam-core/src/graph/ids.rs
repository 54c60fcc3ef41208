//! Identifiers. Both count from zero and index the graph's own lists.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The identifier as an index into the graph's list.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// The identifier of the list's `index`-th entry; `None` where it does not fit 32 bits.
            #[inline]
            pub fn new(index: usize) -> Option<Self> {
                u32::try_from(index).ok().map(Self)
            }
        }
    };
}

id!(
    /// Names one operator of a graph.
    OperatorId
);
id!(
    /// Names one tensor (a storage, not a view) of a graph.
    TensorId
);
id!(
    /// Names one conditional region of a graph.
    RegionId
);
