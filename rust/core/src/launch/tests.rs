//! Plans over a driver that only writes down what it is asked.

use std::cell::{Cell, RefCell};

use super::*;

const NO_CONTEXT: i32 = 201;

/// A launch as the driver gets it: function, stream, values.
type Launch = (usize, usize, Vec<u64>);

#[derive(Debug, Default)]
struct FakeDriver {
    /// Sizes that every function declares; none for a driver that cannot tell.
    declared: Option<Vec<usize>>,
    /// The function that is refused, and with which code.
    refused: Option<(usize, i32)>,
    context: Cell<usize>,
    launches: RefCell<Vec<Launch>>,
}

impl FakeDriver {
    fn declaring(sizes: &[usize]) -> Self {
        Self { declared: Some(sizes.to_vec()), ..Self::default() }
    }

    fn refusing(function: usize, code: i32) -> Self {
        Self { refused: Some((function, code)), ..Self::default() }
    }

    fn functions(&self) -> Vec<usize> {
        self.launches.borrow().iter().map(|launch| launch.0).collect()
    }

    fn answer(&self, function: Function) -> Result<(), Failure> {
        let failure = |code| Failure { code, name: "CUDA_ERROR_X".into(), text: "words".into() };
        match self.refused {
            Some((_, NO_CONTEXT)) if self.context.get() != 0 => Ok(()),
            Some((refused, code)) if refused == function.0 => Err(failure(code)),
            _ => Ok(()),
        }
    }
}

impl Driver for FakeDriver {
    fn param_info(&self, function: Function, index: usize) -> Result<ParamInfo, Failure> {
        let Some(declared) = &self.declared else { return Ok(ParamInfo::Unknown) };
        self.answer(function)?;
        Ok(declared.get(index).map_or(ParamInfo::Absent, |&bytes| ParamInfo::Bytes(bytes)))
    }

    fn launch(&self, kernel: &Kernel, stream: usize, values: &[u64]) -> Result<(), Failure> {
        self.launches.borrow_mut().push((kernel.function.0, stream, values.to_vec()));
        self.answer(kernel.function)
    }

    fn current_context(&self) -> usize {
        self.context.get()
    }

    fn enter(&self, context: usize) -> bool {
        let missing = self.context.get() == 0 && context != 0;
        if missing {
            self.context.set(context);
        }
        missing
    }
}

fn spec(function: usize, params: &[Param]) -> KernelSpec {
    KernelSpec {
        function: Function(function),
        grid: [4, 1, 1],
        threads: 128,
        shared_bytes: 0,
        dependent: false,
        params: params.to_vec(),
    }
}

fn plan<'d>(driver: &'d FakeDriver, specs: &[KernelSpec]) -> Result<Plan<'d, FakeDriver>, CoreError> {
    Plan::new(specs, || Ok(driver))
}

/// The error of a plan that is refused before a driver is looked for.
fn refused(specs: &[KernelSpec]) -> CoreError {
    let load = || -> Result<&FakeDriver, CoreError> { panic!("the driver was loaded") };
    whole(Plan::new(specs, load).map(|_| ()).unwrap_err())
}

fn whole(error: CoreError) -> CoreError {
    assert!(error.found.is_some() && error.needed.is_some() && error.hint.is_some(), "{error:?}");
    error
}

#[test]
fn kernels_are_launched_in_order_with_their_own_values() {
    let driver = FakeDriver::default();
    let first = spec(7, &[Param::Pointer(2), Param::Int32(-1), Param::Pointer(0), Param::Pointer(2)]);
    let second = spec(8, &[Param::Int64(-1), Param::Float32(1.5_f32.to_bits()), Param::Pointer(1)]);
    let plan = plan(&driver, &[first, second, spec(7, &[])]).unwrap();
    assert_eq!(plan.pointers(), 3);
    plan.launch(5, &[10, 20, 30]).unwrap();
    plan.launch(6, &[11, 21, 31, 99]).unwrap();
    let launches = [
        (7, 5, vec![30, 0xFFFF_FFFF, 10, 30]),
        (8, 5, vec![u64::MAX, 0x3FC0_0000, 20]),
        (7, 5, vec![]),
        (7, 6, vec![31, 0xFFFF_FFFF, 11, 31]),
        (8, 6, vec![u64::MAX, 0x3FC0_0000, 21]),
        (7, 6, vec![]),
    ];
    assert_eq!(*driver.launches.borrow(), launches);
}

#[test]
fn as_many_parameters_and_slots_as_there_may_be() {
    let driver = FakeDriver::default();
    let params: Vec<_> = (0..MAX_PARAMS).map(|slot| Param::Pointer(slot as u8)).collect();
    let plan = plan(&driver, &[spec(7, &params)]).unwrap();
    let pointers: Vec<u64> = (100..).take(MAX_POINTERS).collect();
    plan.launch(0, &pointers).unwrap();
    assert_eq!(driver.launches.borrow()[0].2, pointers);
    let one_more = [params.as_slice(), &[Param::Int32(0)]].concat();
    assert_eq!(refused(&[spec(7, &one_more)]).found.as_deref(), Some("65"));
}

#[test]
fn numbers_out_of_range_are_refused_before_the_driver_is_loaded() {
    let good = || spec(7, &[]);
    let cases = [
        ("null function", KernelSpec { function: Function(0), ..good() }),
        ("grid x", KernelSpec { grid: [0, 1, 1], ..good() }),
        ("grid x", KernelSpec { grid: [1 << 31, 1, 1], ..good() }),
        ("grid y", KernelSpec { grid: [1, 65_536, 1], ..good() }),
        ("grid z", KernelSpec { grid: [1, 1, -1], ..good() }),
        ("threads", KernelSpec { threads: 0, ..good() }),
        ("threads", KernelSpec { threads: 1025, ..good() }),
        ("shared bytes", KernelSpec { shared_bytes: -1, ..good() }),
    ];
    for (what, bad) in cases {
        let error = refused(&[good(), bad]);
        assert_eq!(error.kind, ErrorKind::LayoutError);
        assert!(error.message.contains("kernel 1") && error.message.contains(what), "{what}: {error:?}");
    }
    assert_eq!(refused(&[]).kind, ErrorKind::LayoutError);
    let largest = KernelSpec { grid: [(1 << 31) - 1, 65_535, 65_535], threads: 1024, ..good() };
    assert!(plan(&FakeDriver::default(), &[largest]).is_ok());
}

#[test]
fn kinds_and_their_ranges() {
    assert_eq!(Param::new("pointer", 63), Ok(Param::Pointer(63)));
    assert_eq!(Param::new("int32", i64::from(i32::MIN)), Ok(Param::Int32(i32::MIN)));
    assert_eq!(Param::new("int64", i64::MIN), Ok(Param::Int64(i64::MIN)));
    assert_eq!(Param::new("float32", i64::from(u32::MAX)), Ok(Param::Float32(u32::MAX)));
    let unfit = [("pointer", 64), ("pointer", -1), ("int32", 1 << 31), ("float32", -1), ("float32", 1 << 32)];
    for (kind, value) in unfit.into_iter().chain([("float64", 0), ("Pointer", 0)]) {
        let error = whole(Param::new(kind, value).unwrap_err());
        assert_eq!(error.kind, ErrorKind::LayoutError);
    }
}

#[test]
fn the_function_must_declare_the_same_parameters() {
    let specs = [spec(7, &[Param::Pointer(0), Param::Int32(1), Param::Int64(2), Param::Float32(3)])];
    for fitting in [&[8, 4, 8, 4][..], &[8, 4, 8, 4, 8], &[8, 4, 8, 4, 8, 8]] {
        assert!(plan(&FakeDriver::declaring(fitting), &specs).is_ok(), "{fitting:?}");
    }
    let others = [
        &[][..],
        &[8, 4, 8],
        &[8, 8, 8, 4],
        &[4, 4, 8, 4],
        &[8, 4, 8, 2],
        &[8, 4, 8, 4, 4],
        &[8, 4, 8, 4, 8, 4],
        &[8, 4, 8, 4, 8, 8, 8],
    ];
    for other in others {
        let error = whole(plan(&FakeDriver::declaring(other), &specs).unwrap_err());
        assert_eq!(error.kind, ErrorKind::BackendUnavailable, "{other:?}");
        assert!(error.found.unwrap().contains(&format!("{other:?}")));
    }
}

#[test]
fn what_the_driver_cannot_describe_is_unavailable() {
    let driver = FakeDriver { declared: Some(vec![]), ..FakeDriver::refusing(8, 400) };
    let error = whole(plan(&driver, &[spec(7, &[]), spec(8, &[])]).unwrap_err());
    assert_eq!(error.kind, ErrorKind::BackendUnavailable);
    assert!(error.message.contains("kernel 1"));
}

#[test]
fn a_driver_that_is_not_there_is_the_error_of_the_plan() {
    let load = || -> Result<&FakeDriver, CoreError> { Err(too_few_pointers(1, 2)) };
    assert_eq!(Plan::new(&[spec(7, &[])], load).map(|_| ()), Err(too_few_pointers(1, 2)));
}

#[test]
fn too_few_pointers_launch_nothing() {
    let driver = FakeDriver::default();
    let plan = plan(&driver, &[spec(7, &[]), spec(8, &[Param::Pointer(1)])]).unwrap();
    let error = whole(plan.launch(0, &[1]).unwrap_err());
    assert_eq!((error.kind, error.found.as_deref()), (ErrorKind::LayoutError, Some("1 pointers")));
    assert!(driver.launches.borrow().is_empty());
}

#[test]
fn the_first_refused_kernel_ends_the_sequence_and_is_named() {
    for (code, hint) in [(1, "shared memory"), (400, "torch.cuda.device"), (700, "CUDA_LAUNCH_BLOCKING")] {
        let driver = FakeDriver::refusing(8, code);
        let plan = plan(&driver, &[spec(7, &[]), spec(8, &[]), spec(9, &[])]).unwrap();
        let error = whole(plan.launch(0, &[]).unwrap_err());
        assert_eq!(driver.functions(), [7, 8]);
        assert_eq!(error.kind, ErrorKind::DeviceError);
        assert!(error.message.contains("kernel 1") && error.hint.unwrap().contains(hint));
        assert_eq!(error.found, Some(format!("CUDA_ERROR_X ({code}): words")));
    }
}

#[test]
fn a_thread_without_a_context_gets_the_one_of_the_plan() {
    let driver = FakeDriver::refusing(7, NO_CONTEXT);
    driver.context.set(42);
    let plan = plan(&driver, &[spec(7, &[]), spec(8, &[])]).unwrap();
    driver.context.set(0);
    plan.launch(0, &[]).unwrap();
    assert_eq!((driver.context.get(), driver.functions()), (42, vec![7, 7, 8]));
}

#[test]
fn without_a_context_at_either_time_the_launch_fails_once() {
    let driver = FakeDriver::refusing(7, NO_CONTEXT);
    let plan = plan(&driver, &[spec(7, &[])]).unwrap();
    let error = plan.launch(0, &[]).unwrap_err();
    assert!(error.hint.unwrap().contains("torch.cuda.device"));
    assert_eq!(driver.functions(), [7]);
}
