#include "cli/train/image.h"

#include <cairo.h>
#include <fmt/format.h>
#include <headroom/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <string_view>

#include "cli/train/ticks.h"
#include "files/write.h"
#include "record/page.h"

namespace headroom::cli {
namespace {

using Colour = std::array<double, 3>;

constexpr Colour kInk = {0.13, 0.13, 0.13};
constexpr Colour kFaint = {0.85, 0.85, 0.85};

// The colours of the report, in which the same runs have the same order.
std::vector<Colour> line_colours() {
  std::vector<Colour> colours;
  for (const std::string& text : internal::run_colours()) {  // "#rrggbb"
    const auto part = [&](size_t at) { return std::stoi(text.substr(at, 2), nullptr, 16) / 255.0; };
    colours.push_back({part(1), part(3), part(5)});
  }
  return colours;
}

class Canvas {
 public:
  Canvas(int width, int height)
      : surface_(cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height)),
        cairo_(cairo_create(surface_)) {
    set({1.0, 1.0, 1.0});
    cairo_paint(cairo_);
    cairo_select_font_face(cairo_, "sans-serif", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
    cairo_set_line_join(cairo_, CAIRO_LINE_JOIN_ROUND);
  }
  ~Canvas() {
    cairo_destroy(cairo_);
    cairo_surface_destroy(surface_);
  }
  Canvas(const Canvas&) = delete;
  Canvas& operator=(const Canvas&) = delete;

  cairo_t* get() { return cairo_; }
  void set(const Colour& c) { cairo_set_source_rgb(cairo_, c[0], c[1], c[2]); }

  // `align`: 0 puts the left end at x, 1 the right end.
  void text(double x, double y, const std::string& words, double size, double align = 0.0) {
    cairo_move_to(cairo_, x - align * width_of(words, size), y);
    cairo_show_text(cairo_, words.c_str());
  }
  double width_of(const std::string& words, double size) {
    cairo_set_font_size(cairo_, size);
    cairo_text_extents_t extents;
    cairo_text_extents(cairo_, words.c_str(), &extents);
    return extents.x_advance;
  }
  void line(double x0, double y0, double x1, double y1, double width) {
    cairo_set_line_width(cairo_, width);
    cairo_move_to(cairo_, x0, y0);
    cairo_line_to(cairo_, x1, y1);
    cairo_stroke(cairo_);
  }
  void write(const std::string& path) {
    std::string bytes;
    const auto append = [](void* to, const unsigned char* data, unsigned int length) {
      static_cast<std::string*>(to)->append(reinterpret_cast<const char*>(data), length);
      return CAIRO_STATUS_SUCCESS;
    };
    const cairo_status_t status = cairo_surface_write_to_png_stream(surface_, append, &bytes);
    if (status != CAIRO_STATUS_SUCCESS) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' could not be written: {}.", path,
                                                           cairo_status_to_string(status)));
    }
    files::replace_file(path, {bytes});
  }

 private:
  cairo_surface_t* surface_;
  cairo_t* cairo_;
};

// A diverging colour map: blue for -1, white for 0, red for 1.
Colour diverging(double t) {
  t = std::clamp(t, -1.0, 1.0);
  const Colour end = t < 0 ? Colour{0.13, 0.30, 0.66} : Colour{0.73, 0.11, 0.14};
  const double s = std::sqrt(std::fabs(t));
  Colour mixed;
  for (size_t i = 0; i < 3; ++i) mixed[i] = 1.0 + s * s * (end[i] - 1.0) * (0.6 + 0.4 * s);
  return mixed;
}

double amplitude(const Picture& picture) {
  double most = 0.0;
  for (const float value : picture.values) most = std::max(most, std::fabs(double{value}));
  return most > 0.0 ? most : 1.0;
}

void draw_picture(Canvas& canvas, const Picture& picture, double x, double y, double size,
                  double range) {
  const auto width = static_cast<int>(picture.width);
  const auto height = static_cast<int>(picture.height);
  cairo_surface_t* const image = cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height);
  unsigned char* const data = cairo_image_surface_get_data(image);
  const int stride = cairo_image_surface_get_stride(image);
  for (int row = 0; row < height; ++row) {
    auto* const pixels = reinterpret_cast<uint32_t*>(data + static_cast<ptrdiff_t>(row) * stride);
    for (int column = 0; column < width; ++column) {
      const auto at =
          static_cast<size_t>(row) * static_cast<size_t>(width) + static_cast<size_t>(column);
      Colour colour;
      if (picture.channels == 3) {
        for (size_t c = 0; c < 3; ++c) colour[c] = picture.values[3 * at + c];
      } else {
        colour = diverging(picture.values[at] / range);
      }
      uint32_t packed = 0;
      for (const double part : colour) {
        const double clean = std::isfinite(part) ? std::clamp(part, 0.0, 1.0) : 0.0;
        packed = packed << 8 | static_cast<uint32_t>(std::lround(255.0 * clean));
      }
      pixels[column] = packed;
    }
  }
  cairo_surface_mark_dirty(image);
  const double zoom = size / static_cast<double>(std::max(width, height));
  cairo_save(canvas.get());
  cairo_translate(canvas.get(), x, y);
  cairo_scale(canvas.get(), zoom, zoom);
  cairo_set_source_surface(canvas.get(), image, 0, 0);
  cairo_pattern_set_filter(cairo_get_source(canvas.get()), CAIRO_FILTER_NEAREST);
  cairo_paint(canvas.get());
  cairo_restore(canvas.get());
  cairo_surface_destroy(image);
}

// Which of how many curves gets the dashes.
struct Dashes {
  double curve = 0.0;
  double curves = 1.0;
};

// One plot with a logarithmic vertical axis.
class Plot {
 public:
  Plot(Canvas& canvas, double top, double height, const std::string& label, int base)
      : canvas_(canvas), top_(top), height_(height), label_(label), base_(base) {}

  void include(const std::vector<double>& values) {
    for (const double value : values) {
      if (!(value > 0.0) || !std::isfinite(value)) continue;
      low_ = std::min(low_, std::log(value));
      high_ = std::max(high_, std::log(value));
    }
    steps_ = std::max(steps_, values.size());
  }

  void axes() {
    if (!(low_ <= high_)) low_ = 0.0, high_ = 1.0;
    const double unit = std::log(base_);
    // At least a tenth of a power above and below, so that constant values have an axis.
    const double margin = std::max(0.05 * (high_ - low_), 0.1 * unit);
    low_ -= margin;
    high_ += margin;
    canvas_.set(kInk);
    canvas_.text(kLeft, top_ - 10, label_, 14);
    for (const auto& [value, text] : log_ticks(std::exp(low_), std::exp(high_), base_)) {
      const double y = at_y(value);
      canvas_.set(kFaint);
      canvas_.line(kLeft, y, kRight, y, 1);
      canvas_.set(kInk);
      canvas_.text(kLeft - 8, y + 4, text, 11, 1.0);
    }
    canvas_.line(kLeft, top_, kLeft, top_ + height_, 1);
    canvas_.line(kLeft, top_ + height_, kRight, top_ + height_, 1);
    const auto end = static_cast<double>(std::max<size_t>(steps_, 1));
    const double apart = std::max(1.0, round_spacing(end, 6.0));
    for (double step = 0.0; step <= end; step += apart) {
      canvas_.text(at_x(step), top_ + height_ + 16, fmt::format("{:.0f}", step), 11, 0.5);
    }
  }

  // Draws the curve, or only its share of dashes: curves that coincide are striped, so that all of
  // them are visible.
  void draw(const std::vector<double>& values, const Colour& colour, const Dashes& dashes = {}) {
    canvas_.set(colour);
    cairo_t* const cairo = canvas_.get();
    cairo_set_line_width(cairo, 2.6);
    const double on = 14.0, off = on * (dashes.curves - 1.0);
    const double pattern[] = {on, off};
    cairo_set_dash(cairo, pattern, off > 0.0 ? 2 : 0, -on * dashes.curve);
    // At most one point per pixel: the geometric mean of its steps.
    const size_t group = std::max<size_t>(1, values.size() / 800);
    bool open = false;
    for (size_t i = 0; i + group <= values.size(); i += group) {
      double sum = 0.0;
      for (size_t j = 0; j < group; ++j) sum += std::log(values[i + j]);
      const double y = at_y(std::exp(sum / static_cast<double>(group)));
      if (!std::isfinite(y)) {
        open = false;
        continue;
      }
      const double x = at_x(static_cast<double>(i) + 0.5 * static_cast<double>(group));
      open ? cairo_line_to(cairo, x, y) : cairo_move_to(cairo, x, y);
      open = true;
    }
    cairo_stroke(cairo);
    cairo_set_dash(cairo, nullptr, 0, 0.0);
  }

  void mark(double step, double value, const Colour& colour) {
    canvas_.set(colour);
    cairo_arc(canvas_.get(), at_x(step), at_y(value), 3.0, 0.0, 6.2832);
    cairo_fill(canvas_.get());
  }

  static constexpr double kLeft = 86, kRight = 930;

 private:
  double at_x(double step) const {
    return kLeft + (kRight - kLeft) * step / static_cast<double>(std::max<size_t>(steps_, 1));
  }
  double at_y(double value) const {
    return top_ + height_ * (high_ - std::log(value)) / (high_ - low_);
  }

  Canvas& canvas_;
  double top_, height_;
  std::string label_;
  int base_;
  double low_ = INFINITY, high_ = -INFINITY;
  size_t steps_ = 0;
};

}  // namespace

bool can_draw() { return true; }

Picture read_png(const std::string& path) {
  std::array<char, 8> signature{};
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' cannot be opened: {}.", path, std::strerror(errno)));
  }
  file.read(signature.data(), signature.size());
  if (std::string_view(signature.data(), signature.size()) != "\x89PNG\r\n\x1a\n") {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' is not a PNG image.", path));
  }
  cairo_surface_t* const surface = cairo_image_surface_create_from_png(path.c_str());
  const std::unique_ptr<cairo_surface_t, decltype(&cairo_surface_destroy)> owner(
      surface, cairo_surface_destroy);
  const cairo_status_t status = cairo_surface_status(surface);
  if (status != CAIRO_STATUS_SUCCESS) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' is damaged or too large ({}).", path,
                                                         cairo_status_to_string(status)));
  }
  const cairo_format_t format = cairo_image_surface_get_format(surface);
  if (format != CAIRO_FORMAT_ARGB32 && format != CAIRO_FORMAT_RGB24) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' has more than 8 bits per channel; save it with 8.", path));
  }
  Picture picture{
      cairo_image_surface_get_height(surface), cairo_image_surface_get_width(surface), 3, {}};
  const unsigned char* const data = cairo_image_surface_get_data(surface);
  const int stride = cairo_image_surface_get_stride(surface);
  for (int64_t row = 0; row < picture.height; ++row) {
    const auto* const pixels = reinterpret_cast<const uint32_t*>(data + row * stride);
    for (int64_t column = 0; column < picture.width; ++column) {
      for (const int shift : {16, 8, 0}) {
        picture.values.push_back(static_cast<float>(pixels[column] >> shift & 0xff) / 255.0f);
      }
    }
  }
  return picture;
}

void write_panels(const std::string& path, const std::string& title,
                  const std::vector<Panel>& panels) {
  constexpr double kSize = 220, kGap = 24, kTop = 84;
  const auto count = static_cast<double>(panels.size());
  Canvas canvas(static_cast<int>(kGap + count * (kSize + kGap)),
                static_cast<int>(kTop + kSize + 40));
  canvas.set(kInk);
  canvas.text(kGap, 32, title, 18);
  const double range = amplitude(panels[0].picture);
  for (size_t i = 0; i < panels.size(); ++i) {
    const double x = kGap + static_cast<double>(i) * (kSize + kGap);
    canvas.set(kInk);
    canvas.text(x, kTop - 24, panels[i].title, 14);
    canvas.text(x, kTop - 8, panels[i].caption, 12);
    draw_picture(canvas, panels[i].picture, x, kTop, kSize, range);
  }
  if (panels[0].picture.channels == 1) {
    canvas.set(kInk);
    canvas.text(kGap, kTop + kSize + 24,
                fmt::format("blue -{0:.2g}, white 0, red +{0:.2g}, the same in every panel", range),
                12);
  }
  canvas.write(path);
}

Curve curve_of(const std::string& name, const RunResult& result) {
  Curve curve{name, {}, {}, {}};
  for (const StepRecord& step : result.steps) {
    curve.loss.push_back(step.loss);
    curve.scale.push_back(step.scale);
    if (!step.applied) curve.skipped.push_back(step.step);
  }
  return curve;
}

namespace {

// The names of the curves below the title, in as many rows as they need. Returns the end of the
// last row.
double draw_legend(Canvas& canvas, const std::vector<Curve>& curves) {
  const std::vector<Colour> colours = line_colours();
  double x = Plot::kLeft, y = 50;
  for (size_t i = 0; i < curves.size(); ++i) {
    const double width = 28 + canvas.width_of(curves[i].name, 12);
    if (x > Plot::kLeft && x + width > Plot::kRight) {
      x = Plot::kLeft;
      y += 20;
    }
    canvas.set(colours[i % colours.size()]);
    canvas.line(x, y, x + 22, y, 3);
    canvas.set(kInk);
    canvas.text(x + 28, y + 4, curves[i].name, 12);
    x += width + 18;
  }
  return y;
}

}  // namespace

void write_curves(const std::string& path, const std::string& title,
                  const std::vector<Curve>& curves) {
  Canvas canvas(960, 660);
  canvas.set(kInk);
  canvas.text(Plot::kLeft, 30, title, 18);
  const double top = draw_legend(canvas, curves) + 46;
  Plot loss(canvas, top, 400 - top, "loss", 10);
  Plot scale(canvas, 460, 160, "scale (dots: skipped steps)", 2);
  for (const Curve& curve : curves) {
    loss.include(curve.loss);
    scale.include(curve.scale);
  }
  loss.axes();
  scale.axes();
  const std::vector<Colour> colours = line_colours();
  const auto count = static_cast<double>(curves.size());
  for (const bool dashed : {false, true}) {
    for (size_t i = 0; i < curves.size(); ++i) {
      const Colour& colour = colours[i % colours.size()];
      const Dashes dashes = dashed ? Dashes{static_cast<double>(i), count} : Dashes{};
      loss.draw(curves[i].loss, colour, dashes);
      scale.draw(curves[i].scale, colour, dashes);
    }
  }
  for (size_t i = 0; i < curves.size(); ++i) {
    for (const int64_t step : curves[i].skipped) {
      scale.mark(static_cast<double>(step), curves[i].scale[static_cast<size_t>(step) - 1],
                 colours[i % colours.size()]);
    }
  }
  canvas.write(path);
}

}  // namespace headroom::cli
