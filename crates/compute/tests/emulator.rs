//! The emulated device runs kernels as a GPU would, and reports their faults.

use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{BufferId, Device, Dispatch, Grid, Order, constants};

fn floats(device: &mut Emulator, values: &[f32]) -> BufferId {
    let buffer = device.alloc(values.len() * 4).unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    device.upload(buffer.into(), &bytes).unwrap();
    buffer
}

fn read(device: &mut Emulator, buffer: BufferId, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; count * 4];
    device.download(buffer.into(), &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn rms_norm() {
    for seed in 0..4 {
        let mut device = Emulator::new(seed);
        let x: Vec<f32> = (0..3 * 300).map(|i| (i as f32 * 0.37).sin()).collect();
        let weight: Vec<f32> = (0..300).map(|i| 1.0 + i as f32 * 0.01).collect();
        let (a, b, out) =
            (floats(&mut device, &x), floats(&mut device, &weight), device.alloc(x.len() * 4).unwrap());
        let constants = constants(&[&300u32, &1e-6f32]);
        let dispatch = Dispatch {
            unit: "rms_norm",
            kernel: "rms_norm".into(),
            buffers: vec![a.into(), b.into(), out.into()],
            constants,
            grid: Grid::Fixed([3, 1, 1]),
            threads: 128,
            shared: 0,
            order: Order::After,
        };
        device.run(&[dispatch]).unwrap();
        let got = read(&mut device, out, x.len());
        for (got, x) in got.chunks(300).zip(x.chunks(300)) {
            let mut right = x.to_vec();
            moeflux_compute::reference::rms_norm(&mut right, &weight, 1e-6);
            assert!(
                got.iter().zip(&right).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs()),
                "{got:?} {right:?}"
            );
        }
    }
}
