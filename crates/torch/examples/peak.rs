#[path = "../tests/support/rows.rs"]
#[allow(dead_code)]
mod rows;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let (rows, _) = rows::all_rows(&rows::shared().unwrap());
    let r = rows.iter().find(|r| r.set.contains(&a[1]) && r.name.contains(&a[2])).unwrap();
    let run = plimsoll_torch::simulate(&r.arch, &r.recipe, r.gpu.device).unwrap();
    let mut c = r.allocator.clone(); c.limit = None;
    let rep = run.trace.replay(&c);
    let (op, live) = run.trace.at_peak(&rep);
    println!("{} {} at {op}: {:?} {:?}", r.set, r.name, rep.stats, rep.marks);
    println!("measured {:?} {:?}", r.active.map(|x| x/1048576.0), r.reserved.map(|x| x/1048576.0));
    let mut by: std::collections::BTreeMap<String,(u64,u64)> = Default::default();
    for l in live { let k = l.name.split('.').filter(|p| p.parse::<u32>().is_err()).collect::<Vec<_>>().join("."); let e = by.entry(k).or_default(); e.0 += l.bytes; e.1 += 1; }
    let mut v: Vec<_> = by.into_iter().collect(); v.sort_by_key(|x| std::cmp::Reverse(x.1.0));
    for (k,(b,n)) in v.iter().take(45) { println!("{:>10.1} MiB {n:>5} {k}", *b as f64/1048576.0); }
}
