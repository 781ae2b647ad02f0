//! The C side, with functions of our own in the place of the driver's.

use std::cell::{Cell, RefCell};

use super::super::{KernelSpec, Param};
use super::*;

/// What one launch handed over: its shape as numbers, then the parameters read as the declared sizes say.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    attribute: Option<(u32, i32)>,
    values: Vec<u64>,
}

/// Sizes that the functions of these tests declare: ours, then one scratch pointer.
const DECLARED: [usize; 4] = [8, 4, 8, 8];

thread_local! {
    static SEEN: RefCell<Vec<Seen>> = const { RefCell::new(Vec::new()) };
    static CONTEXT: Cell<usize> = const { Cell::new(0) };
}

unsafe fn read(params: Params) -> Vec<u64> {
    let one = |(index, &size): (usize, &usize)| {
        // SAFETY: the caller passes an address for each declared parameter.
        let value = unsafe { *params.add(index) };
        // SAFETY: each is the address of at least `size` bytes.
        // SAFETY: each is the address of at least `size` bytes; the sizes are 4 and 8.
        unsafe { if size == 4 { value.cast::<u32>().read().into() } else { value.cast::<u64>().read() } }
    };
    DECLARED.iter().enumerate().map(one).collect()
}

#[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
unsafe extern "C" fn launch(
    function: usize,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: usize,
    params: Params,
    extra: Params,
) -> i32 {
    assert!(extra.is_null());
    // SAFETY: `LibCuda::launch` passes the parameters of a kernel of these tests.
    let values = unsafe { read(params) };
    let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
    let seen = Seen { function, grid, block, shared, stream, attribute: None, values };
    SEEN.with_borrow_mut(|all| all.push(seen));
    if function == 666 { 700 } else { SUCCESS }
}

unsafe extern "C" fn launch_ex(config: *const Config, function: usize, params: Params, extra: Params) -> i32 {
    assert!(extra.is_null());
    // SAFETY: `LibCuda::launch` passes a live configuration with one attribute.
    let (config, attribute) = unsafe { (&*config, &*(*config).attributes) };
    assert_eq!(config.count, 1);
    // SAFETY: `LibCuda::launch` passes the parameters of a kernel of these tests.
    let values = unsafe { read(params) };
    let seen = Seen {
        function,
        grid: config.grid,
        block: config.block,
        shared: config.shared_bytes,
        stream: config.stream,
        attribute: Some((attribute.id, attribute.value)),
        values,
    };
    SEEN.with_borrow_mut(|all| all.push(seen));
    SUCCESS
}

unsafe extern "C" fn param_info(function: usize, index: usize, offset: *mut usize, size: *mut usize) -> i32 {
    let Some(&bytes) = DECLARED.get(index) else { return INVALID_VALUE };
    // SAFETY: `LibCuda::param_info` passes addresses of live locals.
    unsafe { (offset.write(0), size.write(bytes)) };
    if function == 666 { 400 } else { SUCCESS }
}

unsafe extern "C" fn describe_error(code: i32, text: *mut *const c_char) -> i32 {
    if code != 700 {
        return INVALID_VALUE;
    }
    // SAFETY: `describe` passes the address of a live local.
    unsafe { text.write(c"CUDA_ERROR_ILLEGAL_ADDRESS".as_ptr()) };
    SUCCESS
}

unsafe extern "C" fn get_context(context: *mut usize) -> i32 {
    // SAFETY: `current_context` passes the address of a live local.
    unsafe { context.write(CONTEXT.get()) };
    SUCCESS
}

unsafe extern "C" fn set_context(context: usize) -> i32 {
    CONTEXT.set(context);
    SUCCESS
}

fn driver() -> LibCuda {
    LibCuda {
        launch,
        launch_ex: Some(launch_ex),
        param_info: Some(param_info),
        error_name: describe_error,
        error_text: describe_error,
        get_context,
        set_context,
    }
}

fn kernel(function: usize, dependent: bool) -> Kernel {
    let params = vec![Param::Pointer(0), Param::Int32(-2), Param::Int64(-3)];
    let (grid, threads, shared_bytes) = ([5, 6, 7], 128, 4096);
    let function = Function(function);
    Kernel::new(0, &KernelSpec { function, grid, threads, shared_bytes, dependent, params }).unwrap()
}

fn launched(driver: &LibCuda, kernel: &Kernel) -> (Result<(), Failure>, Seen) {
    let mut block = [u64::MAX; MAX_PARAMS];
    let outcome = driver.launch(kernel, 77, kernel.fill(&[0xABCD_EF01_2345_6789], &mut block));
    let mut seen = SEEN.take();
    assert_eq!(seen.len(), 1);
    (outcome, seen.remove(0))
}

fn expected(attribute: Option<(u32, i32)>) -> Seen {
    Seen {
        function: 9,
        grid: [5, 6, 7],
        block: [128, 1, 1],
        shared: 4096,
        stream: 77,
        attribute,
        values: vec![0xABCD_EF01_2345_6789, 0xFFFF_FFFE, (-3_i64) as u64, 0],
    }
}

#[test]
fn plain_launch_passes_shape_values_and_null_scratch() {
    assert_eq!(launched(&driver(), &kernel(9, false)), (Ok(()), expected(None)));
}

#[test]
fn dependent_launch_carries_the_attribute() {
    let attribute = Some((PROGRAMMATIC_STREAM_SERIALIZATION, 1));
    assert_eq!(launched(&driver(), &kernel(9, true)), (Ok(()), expected(attribute)));
}

#[test]
fn dependent_launch_is_a_plain_one_where_the_driver_is_older() {
    let older = LibCuda { launch_ex: None, ..driver() };
    assert_eq!(launched(&older, &kernel(9, true)), (Ok(()), expected(None)));
}

#[test]
fn failures_carry_the_words_of_the_driver() {
    let (outcome, _) = launched(&driver(), &kernel(666, false));
    let words = "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned();
    assert_eq!(outcome, Err(Failure { code: 700, name: words.clone(), text: words }));
    let unknown = driver().param_info(Function(666), 0).unwrap_err();
    assert_eq!((unknown.code, unknown.name.as_str()), (400, "unknown to this driver"));
}

#[test]
fn parameters_are_told_one_by_one() {
    let told: Vec<_> = (0..5).map(|index| driver().param_info(Function(9), index).unwrap()).collect();
    let sizes = DECLARED.map(ParamInfo::Bytes);
    assert_eq!(told, [sizes.as_slice(), &[ParamInfo::Absent]].concat());
    let older = LibCuda { param_info: None, ..driver() };
    assert_eq!(older.param_info(Function(9), 0), Ok(ParamInfo::Unknown));
}

#[test]
fn only_a_thread_without_a_context_is_given_one() {
    let driver = driver();
    assert!(!driver.enter(0));
    assert!(driver.enter(11));
    assert_eq!(driver.current_context(), 11);
    assert!(!driver.enter(12));
    assert_eq!(driver.current_context(), 11);
}
