//! Pure Rust core of routed-experts: no Python, no torch.

pub mod cost;
pub mod dispatch;
pub mod error;
pub mod experts;
pub mod facts;
pub mod launch;
pub mod layout;
pub mod profile;
mod report;
pub mod requirements;
pub mod select;
pub mod toolkit;
pub mod version;
