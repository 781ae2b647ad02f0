//! Pure Rust core of routed-experts: no Python, no torch.

pub mod error;
pub mod layout;
