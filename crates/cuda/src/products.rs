//! Matrix products through cuBLASLt: which algorithm computes a shape fastest is
//! measured once and kept on disk, so that later runs take the same one (and give
//! the same bits).

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::ptr;

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys;
use plimsoll_arch::DType;

use crate::driver::Context;
use crate::error::CudaError;
use crate::library;

/// d (m, n) = op(a) op(b) [+ c] [+ bias], column-major.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Product {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    /// Whether a and b are stored transposed.
    pub transposed: (bool, bool),
    /// Elements from column to column of a, b, c, d.
    pub strides: [u64; 4],
    pub input: DType,
    pub output: DType,
    /// A bias for every row of d, in the type of the output.
    pub bias: bool,
    /// c is added; it may be d.
    pub add: bool,
    /// Bytes that the addresses of a, b, c, d are multiples of.
    pub alignment: [u32; 4],
    /// Bytes of workspace.
    pub workspace: u64,
}

impl fmt::Display for Product {
    /// The key in the disk cache, and how messages call it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |t: bool| if t { 'T' } else { 'N' };
        let (a, b) = (letter(self.transposed.0), letter(self.transposed.1));
        write!(f, "{a}{b} {}x{}x{} {}->{}", self.m, self.n, self.k, self.input, self.output)?;
        write!(f, "{}{}", if self.bias { "+bias" } else { "" }, if self.add { "+c" } else { "" })?;
        write!(f, " ld{:?} align{:?} ws{}", self.strides, self.alignment, self.workspace)
    }
}

/// Addresses of a product's operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub d: u64,
    pub bias: u64,
    /// The product is multiplied with this.
    pub scale: f32,
    pub workspace: u64,
    pub workspace_bytes: u64,
}

/// cuBLASLt's words for a product, and the algorithm to use.
struct Plan {
    description: lt::cublasLtMatmulDesc_t,
    /// Of a, b, c, d.
    layouts: [lt::cublasLtMatrixLayout_t; 4],
    algorithm: Option<lt::cublasLtMatmulAlgo_t>,
}

/// Candidates of the heuristic that are timed.
const CANDIDATES: usize = 16;
/// FLOP from which on a product is long enough to heat a chip.
const POWER_LIMITED: f64 = 5e10;
/// How many of the best run on, and for how long (before and while the clock runs).
const FINALISTS: usize = 4;
const SETTLING_MS: f32 = 30.0;
const SUSTAINED_MS: f32 = 50.0;

/// A handle, the plans made so far, and the measured choices.
pub(crate) struct Products {
    handle: lt::cublasLtHandle_t,
    plans: RefCell<HashMap<Product, Plan>>,
    /// Algorithm by product, as on disk.
    choices: RefCell<BTreeMap<String, [u64; 8]>>,
    file: Option<PathBuf>,
    changed: std::cell::Cell<bool>,
}

fn check(call: &'static str, status: lt::cublasStatus_t) -> Result<(), CudaError> {
    match status {
        lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        _ => Err(CudaError::Blas { call, status: format!("{status:?}") }),
    }
}

/// Calls a cuBLASLt function and checks its status.
macro_rules! blas {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: live handles, and pointers to values of the size that is named.
        check(stringify!($function), unsafe { lt::$function($($argument),*) })
    };
}

fn data_type(dtype: DType) -> lt::cudaDataType {
    match dtype {
        DType::Bf16 => lt::cudaDataType_t::CUDA_R_16BF,
        _ => lt::cudaDataType_t::CUDA_R_32F,
    }
}

impl Products {
    pub fn new(context: &Context) -> Result<Products, CudaError> {
        library::need_cublaslt()?;
        let mut handle = ptr::null_mut();
        blas!(cublasLtCreate(&mut handle))?;
        // SAFETY: takes nothing.
        let version = unsafe { lt::cublasLtGetVersion() };
        let name: String = context
            .info
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        let file = library::cache_folder().map(|folder| {
            folder.join("products").join(format!("{name}-{}-{version}.json", context.info.driver))
        });
        let choices = file
            .as_ref()
            .and_then(|f| fs::read(f).ok())
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        Ok(Products {
            handle,
            plans: RefCell::default(),
            choices: RefCell::new(choices),
            file,
            changed: false.into(),
        })
    }

    /// Whether the algorithm of this product is settled.
    pub fn is_tuned(&self, product: &Product) -> bool {
        self.plans.borrow().get(product).is_some_and(|p| p.algorithm.is_some())
            || self.choices.borrow().contains_key(&product.to_string())
    }

    /// Runs a product. Nothing is measured here: what was not tuned takes the
    /// heuristic's first choice.
    pub fn run(
        &self,
        product: &Product,
        operands: &Operands,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        let mut plans = self.plans.borrow_mut();
        if !plans.contains_key(product) {
            plans.insert(product.clone(), Plan::new(product)?);
        }
        let plan = plans.get_mut(product).expect("inserted above");
        let algorithm = match plan.algorithm {
            Some(algorithm) => algorithm,
            None => self.choose(plan, product, operands)?,
        };
        plan.algorithm = Some(algorithm);
        plan.launch(self.handle, product, operands, &algorithm, stream)
    }

    /// The choice on disk if cuBLASLt still accepts it, else the heuristic's first.
    fn choose(
        &self,
        plan: &Plan,
        product: &Product,
        operands: &Operands,
    ) -> Result<lt::cublasLtMatmulAlgo_t, CudaError> {
        if let Some(data) = self.choices.borrow().get(&product.to_string()) {
            let algorithm = lt::cublasLtMatmulAlgo_t { data: *data };
            if plan.accepts(self.handle, &algorithm, operands.workspace_bytes) {
                return Ok(algorithm);
            }
        }
        let first = self.candidates(plan, product, operands)?.into_iter().next();
        first.ok_or_else(|| CudaError::NoAlgorithm {
            product: product.to_string(),
            workspace: operands.workspace_bytes,
        })
    }

    fn candidates(
        &self,
        plan: &Plan,
        product: &Product,
        operands: &Operands,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, CudaError> {
        let mut preference = ptr::null_mut();
        blas!(cublasLtMatmulPreferenceCreate(&mut preference))?;
        use lt::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let set = |attribute, value: *const c_void, size| {
            blas!(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size))
        };
        let workspace = operands.workspace_bytes;
        let mut ready = set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            ptr::from_ref(&workspace).cast(),
            8,
        );
        let attributes = [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, bytes) in attributes.into_iter().zip(&product.alignment) {
            ready = ready.and_then(|()| set(attribute, ptr::from_ref(bytes).cast(), 4));
        }
        // SAFETY: plain numbers; cuBLASLt fills in as many as it counts.
        let mut results: [lt::cublasLtMatmulHeuristicResult_t; CANDIDATES] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        let [a, b, c, d] = plan.layouts;
        let found = ready.and_then(|()| {
            blas!(cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.description,
                a,
                b,
                c,
                d,
                preference,
                CANDIDATES as i32,
                results.as_mut_ptr(),
                &mut count,
            ))
        });
        let _ = blas!(cublasLtMatmulPreferenceDestroy(preference));
        found?;
        let usable = |r: &&lt::cublasLtMatmulHeuristicResult_t| {
            r.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && r.workspaceSize as u64 <= workspace
        };
        Ok(results[..count.max(0) as usize].iter().filter(usable).map(|r| r.algo).collect())
    }

    /// Measures the heuristic's candidates on the operands' own memory, which it
    /// overwrites, and keeps the fastest.
    ///
    /// A large product runs at the chip's power limit, where the fastest algorithm
    /// of a short burst may not be the fastest in the long run: the best of them
    /// run on until the clocks have settled.
    pub fn tune(
        &self,
        product: &Product,
        operands: &Operands,
        context: &Context,
    ) -> Result<(), CudaError> {
        let plan = Plan::new(product)?;
        let work = 2.0 * product.m as f64 * product.n as f64 * product.k as f64;
        // About as long as a large product takes; small ones are noisy.
        let repeats = (2e11 / work).clamp(2.0, 20.0) as usize;
        let (start, end) = (context.event()?, context.event()?);
        let time = |algorithm: &lt::cublasLtMatmulAlgo_t, repeats: usize| {
            start.record(context.stream)?;
            for _ in 0..repeats {
                plan.launch(self.handle, product, operands, algorithm, context.stream)?;
            }
            end.record(context.stream)?;
            end.wait()?;
            Ok::<f32, CudaError>(start.until(&end)? / repeats as f32)
        };
        let mut timed = Vec::new();
        for candidate in self.candidates(&plan, product, operands)? {
            // The first launch loads the kernel; one that fails is no candidate.
            if time(&candidate, 1).is_ok() {
                let milliseconds = time(&candidate, repeats)?.min(time(&candidate, repeats)?);
                timed.push((milliseconds, candidate));
            }
        }
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        if work >= POWER_LIMITED && timed.len() > 1 {
            let most = timed[0].0 * 1.08;
            timed.retain(|(milliseconds, _)| *milliseconds <= most);
            timed.truncate(FINALISTS);
            for (milliseconds, algorithm) in &mut timed {
                let launches = |window: f32| (window / *milliseconds).max(1.0) as usize;
                time(algorithm, launches(SETTLING_MS))?;
                *milliseconds = time(algorithm, launches(SUSTAINED_MS))?;
            }
            timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        let Some((_, algorithm)) = timed.first() else {
            return Err(CudaError::NoAlgorithm {
                product: product.to_string(),
                workspace: operands.workspace_bytes,
            });
        };
        self.choices.borrow_mut().insert(product.to_string(), algorithm.data);
        self.changed.set(true);
        self.plans.borrow_mut().remove(product);
        Ok(())
    }

    /// Writes new choices to disk, beside what other processes wrote meanwhile.
    pub fn save(&self) {
        let Some(file) = self.file.as_ref().filter(|_| self.changed.replace(false)) else {
            return;
        };
        let mut all: BTreeMap<String, [u64; 8]> = fs::read(file)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        all.extend(self.choices.borrow().iter().map(|(k, v)| (k.clone(), *v)));
        if let Ok(text) = serde_json::to_vec_pretty(&all) {
            library::write_cache(file, &text);
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        let _ = blas!(cublasLtDestroy(self.handle));
    }
}

impl Plan {
    fn new(product: &Product) -> Result<Plan, CudaError> {
        let mut plan =
            Plan { description: ptr::null_mut(), layouts: [ptr::null_mut(); 4], algorithm: None };
        // Float32 stays float32: no TF32.
        let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = lt::cudaDataType_t::CUDA_R_32F;
        blas!(cublasLtMatmulDescCreate(&mut plan.description, compute, scale))?;
        use lt::cublasLtMatmulDescAttributes_t as Attribute;
        let operation = |transposed: bool| i32::from(transposed); // CUBLAS_OP_N, CUBLAS_OP_T
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(product.transposed.0))?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(product.transposed.1))?;
        if product.bias {
            let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let Product { m, n, k, transposed, .. } = *product;
        let shapes = [
            if transposed.0 { (k, m) } else { (m, k) },
            if transposed.1 { (n, k) } else { (k, n) },
            (m, n),
            (m, n),
        ];
        for (i, (rows, cols)) in shapes.into_iter().enumerate() {
            let dtype = data_type(if i < 2 { product.input } else { product.output });
            let stride = product.strides[i] as i64;
            blas!(cublasLtMatrixLayoutCreate(&mut plan.layouts[i], dtype, rows, cols, stride))?;
        }
        Ok(plan)
    }

    fn set<T>(
        &self,
        attribute: lt::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), CudaError> {
        blas!(cublasLtMatmulDescSetAttribute(
            self.description,
            attribute,
            ptr::from_ref(value).cast(),
            size_of::<T>(),
        ))
    }

    fn accepts(
        &self,
        handle: lt::cublasLtHandle_t,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        workspace: u64,
    ) -> bool {
        let [a, b, c, d] = self.layouts;
        // SAFETY: plain numbers.
        let mut result: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        blas!(cublasLtMatmulAlgoCheck(handle, self.description, a, b, c, d, algorithm, &mut result))
            .is_ok()
            && result.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && result.workspaceSize as u64 <= workspace
    }

    fn launch(
        &self,
        handle: lt::cublasLtHandle_t,
        product: &Product,
        operands: &Operands,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        if product.bias {
            let attribute = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.set(attribute, &operands.bias)?;
        }
        let (alpha, beta) = (operands.scale, if product.add { 1.0f32 } else { 0.0 });
        let [a, b, c, d] = self.layouts;
        // SAFETY: the operands are tensors of the slab of the described shapes; the
        // two factors are read before the call returns.
        let status = unsafe {
            lt::cublasLtMatmul(
                handle,
                self.description,
                ptr::from_ref(&alpha).cast(),
                operands.a as *const c_void,
                a,
                operands.b as *const c_void,
                b,
                ptr::from_ref(&beta).cast(),
                operands.c as *const c_void,
                c,
                operands.d as *mut c_void,
                d,
                algorithm,
                operands.workspace as *mut c_void,
                operands.workspace_bytes as usize,
                stream.cast(),
            )
        };
        if status == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            return Ok(());
        }
        Err(CudaError::Product { status: format!("{status:?}"), product: product.to_string() })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            let _ = blas!(cublasLtMatrixLayoutDestroy(layout));
        }
        if !self.description.is_null() {
            let _ = blas!(cublasLtMatmulDescDestroy(self.description));
        }
    }
}
