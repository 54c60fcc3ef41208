//! Deserializers that take records as objects only; serde's own would take arrays of values as
//! well.

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;

struct Record<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Record<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectOnly<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectOnly<T> {
            type Value = T;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_map(ObjectOnly(PhantomData)).map(Record)
    }
}

pub(crate) fn one<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Record::deserialize(deserializer).map(|Record(value)| value)
}

/// For a key that is left out or holds a record, never null.
pub(crate) fn some<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    one(deserializer).map(Some)
}

pub(crate) fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Records<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Records<T> {
        type Value = Vec<T>;
        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a list of objects")
        }
        fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut records = Vec::new();
            while let Some(Record(value)) = list.next_element()? {
                records.push(value);
            }
            Ok(records)
        }
    }
    deserializer.deserialize_seq(Records(PhantomData))
}
